"""Two methods on digits from Python: compare them with Local, then use one client's own model."""

import numpy as np
from sklearn.datasets import load_digits

import perfed

run = perfed.run("fedavg", "ditto", data="digits", clients=8, rounds=5, out="runs/quickstart")

for method in run.summary():
    gain = "" if method["gain"] is None else f"  gain over Local {method['gain']['mean']:+.3f}"
    print(f"{method['title']:<8} mean accuracy {method['accuracy']['mean']:.3f}{gain}")

client = run.client("client_03")  # of the last method: ditto
images = (load_digits().images[:10, None] / 16).astype(np.float32)
print("client_03 reads", client.predict(images).tolist(), "in", load_digits().target[:10].tolist())
print("its model is", client.path)
