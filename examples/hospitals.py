"""Makes the tables of four invented hospitals: natural units, gaps, a missing column, spellings of their own."""

import csv
from pathlib import Path

import numpy as np

SITES = {  # patients, mean age, what shifts the risk, and how the site writes the outcome
    "bergen": (900, 66, 0.0, ("no", "yes")),
    "malmo": (800, 58, -0.4, ("0", "1")),  # has no laboratory for crp
    "tartu": (900, 61, -2.8, ("0", "1")),  # a screening programme: about 3 % are ill
    "turku": (600, 70, 0.3, ("0", "1")),  # joins later
}


def patients(site: str, seed: int) -> list[dict[str, str]]:
    """Draw a site's patients: age in years, glucose in mg/dl, pressure in mmHg, crp in mg/l."""
    count, mean_age, shift, outcome = SITES[site]
    draw = np.random.default_rng(seed)
    age, glucose = draw.normal(mean_age, 12, count), draw.normal(105, 25, count)
    pressure, crp = draw.normal(128, 16, count), draw.lognormal(2, 0.6, count)
    sex, smoker = draw.choice(["F", "M"], count), draw.choice(["never", "former", "current"], count, p=[0.5, 0.3, 0.2])
    risk = (age - 62) / 6 + (glucose - 105) / 15 + (pressure - 128) / 20 + (crp - 9) / 5
    risk += 0.8 * (sex == "M") + 1.2 * (smoker == "current") - 0.8 + 2 * shift
    ill = risk + draw.logistic(0, 0.5, count) > 0
    gaps = draw.random(count) < 0.05
    rows = []
    for row in range(count):
        rows.append(
            {
                "age": f"{age[row]:.0f}",
                "sex": sex[row],
                "smoker": smoker[row],
                "glucose": "" if gaps[row] else f"{glucose[row]:.0f}",
                "pressure": f"{pressure[row]:.0f}",
                "crp": f"{crp[row]:.1f}",
                "label": outcome[int(ill[row])],
            }
        )
        if site == "malmo":
            del rows[-1]["crp"]
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a CSV file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)


if __name__ == "__main__":
    for seed, site in enumerate(SITES):
        rows = patients(site, seed)
        folder = Path("later" if site == "turku" else "hospitals")
        write(folder / f"{site}.csv", rows)
        share = np.mean([row["label"] in ("yes", "1") for row in rows])
        print(f"{folder / site}.csv: {len(rows)} patients, {100 * share:.0f} % of them ill")
    write(
        Path("ward.csv"),
        [{key: row[key] for key in reversed(row) if key != "label"} for row in patients("bergen", 9)[:5]],
    )
