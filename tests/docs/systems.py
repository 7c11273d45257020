"""The systems of the survey and of the papers beside it, at their places in the survey's tree: docs/taxonomy.md."""

from typing import NamedTuple

from perfed.report.tables import markdown
from perfed.training.catalog import Entry, methods


class System(NamedTuple):
    """One system: its name, the methods that are to carry it out, who names it, and the flags it is run with."""

    title: str
    methods: str
    source: str
    flags: str = ""


GLOBAL, PERSONAL = "Strategy I: one global model, then personalised", "Strategy II: personalised models"
OUTSIDE = "Outside the tree"
TREE = {
    (GLOBAL, "data", "Data augmentation"): (
        System("Data sharing (Zhao et al.)", "zhao", "survey, [21]"),
        System("FAug", "faug", "survey, [22]"),
        System("Astraea", "astraea", "survey, [23]"),
        System("FedHome", "fedhome", "survey, [24]"),
    ),
    (GLOBAL, "data", "Client selection"): (
        System("FAVOR", "favor", "survey, [25]"),
        System("Class-imbalance bandit", "cucb", "survey, [26]"),
        System("TiFL", "tifl", "survey, [27]"),
        System("FedSAE", "fedsae", "survey, [28]"),
    ),
    (GLOBAL, "model", "Regularised local loss"): (
        System("FedProx", "fedprox", "survey, [29]"),
        System("FedCL", "fedcl", "survey, [30]"),
        System("SCAFFOLD", "scaffold", "survey, [12]"),
        System("MOON", "moon", "survey, [32]"),
        System("FedDyn", "feddyn", "PGFed, Table 1"),
        System("FedAlign", "fedalign", "PGFed, related work"),
    ),
    (GLOBAL, "model", "Meta-learning"): (
        System("Jiang et al.", "jiang", "survey, [36]"),
        System("Reptile; ARUBA", "reptile aruba", "survey, [35] and [40]"),
        System("Per-FedAvg, first order", "perfedavg", "survey, [37]", "--variant fo"),
        System("Per-FedAvg, Hessian-free", "perfedavg", "survey, [37]", "--variant hf"),
        System("pFedMe", "pfedme", "survey, [39]"),
    ),
    (GLOBAL, "model", "Transfer learning"): (
        System("FedHealth; FedSteg", "fedhealth fedsteg", "survey, [43] and [44] (and FedMD, below)"),
    ),
    (PERSONAL, "architecture", "Parameter decoupling"): (
        System("FedPer", "fedper", "survey, [46]"),
        System("User embeddings (FURL)", "furl", "survey, [47]"),
        System("LG-FedAvg", "lgfedavg", "survey, [48]"),
        System("Split learning; SplitFed", "splitlearning splitfed", "survey, [49] to [51], told apart from this"),
        System("FedRep", "fedrep", "PGFed, Table 1"),
        System("FedBABU", "fedbabu", "PGFed, Table 1"),
        System("FedRoD", "fedrod", "PGFed, Table 1"),
        System("FedAlt; FedSim", "fedalt fedsim", "pFedMT, related work"),
        System("pFedMB", "pfedmb", "its own paper"),
    ),
    (PERSONAL, "architecture", "Knowledge distillation"): (
        System("FedMD", "fedmd", "survey, [42], also under transfer learning"),
        System("FedGen", "fedgen", "survey, [55]"),
        System("FedDF", "feddf", "survey, [56]"),
        System("FedGKT", "fedgkt", "survey, [57]"),
        System("D-Distillation", "ddistill", "survey, [58]"),
    ),
    (PERSONAL, "similarity", "Multi-task learning"): (
        System("MOCHA", "mocha", "survey, [59]"),
        System("VIRTUAL", "virtual", "survey, [60]"),
        System("FedAMP", "fedamp", "survey, [61]"),
        System("FedCurv", "fedcurv", "survey, [62]"),
        System("FedEM", "fedem", "pFedMT, related work"),
        System("pFedBayes", "pfedbayes", "pFedMT, related work"),
        System("PGFed", "pgfed", "its own paper"),
        System("PGFedMo", "pgfedmo", "its own paper"),
    ),
    (PERSONAL, "similarity", "Model interpolation"): (
        System("L2GD", "l2gd", "survey, [63]"),
        System("APFL", "apfl", "survey, [64]"),
        System("Three approaches (Mansour et al.)", "hypcluster dapper mapper", "survey, [17]"),
        System("HeteroFL", "heterofl", "survey, [65]"),
        System("Ditto", "ditto", "survey, [88], for its metrics"),
        System("FedFomo", "fedfomo", "PGFed, Table 1"),
        System("APPLE", "apple", "PGFed, related work"),
        System("FLIX", "flix", "pFedMT, related work"),
    ),
    (PERSONAL, "similarity", "Clustering"): (
        System("CFL", "cfl", "survey, [66]"),
        System("FL+HC", "flhc", "survey, [67]"),
        System("IFCA", "ifca", "survey, [68]"),
        System("CBFL", "cbfl", "survey, [69]"),
        System("FedGroup", "fedgroup", "survey, [70]"),
        System("FedSEM (multi-centre)", "fedsem", "survey, [72]"),
        System("Known clusters, AL2GD (Lyu et al.)", "al2gd", "pFedMT, related work"),
    ),
    (OUTSIDE, "", ""): (
        System("FedAvg", "fedavg", "survey, [9]"),
        System("FedAvg with fine-tuning", "fedavg", "survey, section II-A", "--fine-tune 5"),
        System("Local", "local", "survey, formula 3"),
        System("FedMA", "fedma", "survey, [92], as a direction for research"),
        System("HierFAVG", "hierfavg", "pFedMT, related work"),
        System("pFedMT", "pfedmt", "its own paper"),
    ),
}
SYSTEMS = [system for place in TREE.values() for system in place]
HEADINGS = ("system", "named in", "method", "facts", "run")


def further() -> list[Entry]:
    """Return the methods that carry out none of the systems."""
    of_systems = {name for system in SYSTEMS for name in system.methods.split()}
    return [entry for name, entry in methods().items() if name not in of_systems]


def row(system: System) -> tuple[str, ...]:
    """Return a line of the page: where the system's methods are, or that there is none yet."""
    known, names = methods(), system.methods.split()
    here = [name for name in names if name in known]
    files = [f"[`{name}`](../src/perfed/methods/{name}.py)" if name in here else f"`{name}`: not yet" for name in names]
    facts = [f"[{name}](catalogue.md#{name})" for name in here]
    runs = [f"`perfed run {name} {system.flags}".strip() + "`" for name in here]
    return system.title, system.source, *(", ".join(cells) for cells in (files, facts, runs))


def place_of(entry: Entry) -> tuple[str, str, str]:
    """Return the place in the tree that a method's category names, in the survey's words or in ours."""
    words = entry.category.partition(": ")[2].split(" ")[0].lower().replace("regularized", "regularised")
    matches = [place for place in TREE if words and words in place[2].lower()]
    return matches[0] if matches else (OUTSIDE, "", "")


def systems() -> str:
    """Make the tree: a table for each of its places, with the systems there and the methods beside them."""
    text, strategy = [], None
    for place, those in TREE.items():
        if place[0] != strategy:
            strategy = place[0]
            text.append(f"### {strategy}\n")
        if place[2]:
            text.append(f"**{place[2]}** ({place[1]}-based)\n")
        rows = [row(system) for system in those]
        beside = [entry for entry in further() if place_of(entry) == place]
        rows += [row(System(entry.title, entry.name, "not among the 63")) for entry in beside]
        text.append(markdown(HEADINGS, rows))
    missing = [name for system in SYSTEMS for name in system.methods.split() if name not in methods()]
    whole = sum(all(name in methods() for name in system.methods.split()) for system in SYSTEMS)
    text.append(
        f"{whole} of the {len(SYSTEMS)} systems are there. "
        + f"Not yet: {', '.join(f'`{name}`' for name in missing)}. " * bool(missing)
        + f"Beside them: {', '.join(f'`{entry.name}`' for entry in further())}.\n"
    )
    return "\n".join(text)
