"""Labels of the user's own files: how each client spells them, and the classes that they become.

The classes are the labels that occur: whole numbers in their order, words in alphabetical order. Labels that cannot be
the classes of one task, because clients spell them differently, are refused until data.labels says what means what.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfed.core.errors import Problem, few
from perfed.data.config import DataConfig
from perfed.data.table import Table

MOST_CLASSES = 10_000  # a larger label is an id or a measurement by mistake
NAMED = 5  # labels in an example
YES = frozenset({"1", "yes", "y", "true", "t", "positive", "pos", "present"})
NO = frozenset({"0", "no", "n", "false", "f", "negative", "neg", "absent"})
_BETWEEN_WORDS = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W_])")


@dataclass(frozen=True)
class Labels:
    """The labels of all rows as classes.

    Attributes:
        y: [rows], the class of each row.
        names: what each class is called.
        notices: what looks wrong with them, in sentences.
    """

    y: np.ndarray
    names: tuple[str, ...]
    notices: tuple[str, ...]


def read_labels(tables: Sequence[Table], config: DataConfig) -> Labels:
    """Make classes of the labels of all tables, renamed where data.labels says so.

    Args:
        tables: the rows of all clients; a client may have several tables.
        config: data.labels.

    Returns:
        The class of every row, table after table.
    """
    renames = config.renames()
    spelled = [_spelled(table) for table in tables]
    known = {label for labels in spelled for label in labels}
    notices = [
        f"data.labels renames '{old}', but no client has this label (they have: {few(sorted(known))})"
        for old in renames
        if old not in known
    ]
    spelled = [[renames.get(label, label) for label in labels] for labels in spelled]
    counts: dict[str, Counter[str]] = {}
    for table, labels in zip(tables, spelled, strict=True):
        counts.setdefault(table.client, Counter()).update(labels)
    agreed = set(renames.values())
    _refuse_numbers_beside_words(counts, agreed)
    _refuse_spellings(counts, agreed)
    names = _names(tables, spelled, counts)
    number = {name: index for index, name in enumerate(names)}
    y = np.array([number[label] for labels in spelled for label in labels], dtype=np.int64)
    return Labels(y, tuple(names), (*notices, *of_single_clients(counts)))


def _spelled(table: Table) -> list[str]:
    """Return a table's labels as text, whole numbers without a point: 1.0 is the label 1."""
    return [spelling(str(label)) for label in table.y.tolist()]


def spelling(label: str) -> str:
    """Return a label without spaces around it; a whole number without a point."""
    try:
        value = float(label)
    except ValueError:
        return label.strip()
    return str(int(value)) if value == value // 1 else label.strip()


def is_number(label: str) -> bool:
    """Return True if a label can be read as a number."""
    try:
        float(label)
    except ValueError:
        return False
    return True


def _names(tables: Sequence[Table], spelled: Sequence[list[str]], counts: dict[str, Counter[str]]) -> list[str]:
    """Return the names of the classes; where all are numbers, they must be whole numbers from 0."""
    names = {label for labels in counts.values() for label in labels}
    if not all(map(is_number, names)):
        return sorted(names)
    fits = {name: name.isdecimal() and int(name) < MOST_CLASSES for name in names}
    for table, labels in zip(tables, spelled, strict=True):
        for row, label in enumerate(labels):
            if not fits[label]:
                raise Problem(
                    f"{table.row(row).replace(' of x', ' of y')}: the label {table.y[row]} is not a whole number from "
                    f"0 to {MOST_CLASSES - 1} (numbers to predict: --task regression)"
                )
    return sorted(names, key=int)


def _refuse_numbers_beside_words(counts: dict[str, Counter[str]], agreed: set[str]) -> None:
    """Refuse clients that write words where others write numbers."""
    words = next((client for client, labels in counts.items() if not any(map(is_number, labels))), None)
    numbers = next((client for client, labels in counts.items() if all(map(is_number, labels))), None)
    if words is not None and numbers is not None and not agreed.issuperset(counts[words] | counts[numbers]):
        raise _two_alphabets((words, set(counts[words])), (numbers, set(counts[numbers])))


def _refuse_spellings(counts: dict[str, Counter[str]], agreed: set[str]) -> None:
    """Refuse labels that clients write differently: in capitals, with dashes, or in other words for yes and no."""
    owner = {label: client for client, labels in counts.items() for label in labels}
    alike: dict[str, str] = {}
    for label in sorted(owner):
        other = alike.setdefault(_BETWEEN_WORDS.sub(" ", label.casefold()), label)
        together = other == label or any(label in labels and other in labels for labels in counts.values())
        if not together and not agreed.issuperset((label, other)):
            raise Problem(
                f"the labels '{other}' (client '{owner[other]}') and '{label}' (client '{owner[label]}') are one word "
                f"in two spellings: rename one with --labels '{label}={other}' (or keep both with --labels "
                f"'{label}={label},{other}={other}')"
            )
    first: tuple[str, set[str]] | None = None
    for client, labels in counts.items():
        if not all(label.casefold() in YES | NO for label in labels):
            continue
        if first is None:
            first = client, set(labels)
        elif _contradict(first[1], set(labels)) and not agreed.issuperset(first[1] | set(labels)):
            raise _two_alphabets((client, set(labels)), first)


def _contradict(first: set[str], second: set[str]) -> bool:
    """Return True if two clients share no label, but both say yes, or both say no, in words of their own."""
    return first.isdisjoint(second) and not {_means(word) for word in first}.isdisjoint(_means(word) for word in second)


def _two_alphabets(theirs: tuple[str, set[str]], usual: tuple[str, set[str]]) -> Problem:
    """Return the Problem of two clients whose labels cannot be the classes of one task."""
    (client, labels), (other, known) = theirs, usual
    meaning = lambda label, words: next((word for word in sorted(words) if _means(word) == _means(label)), "...")
    example = ",".join(f"{label}={meaning(label, known)}" for label in sorted(labels)[:NAMED])
    keep = ",".join(f"{label}={label}" for label in sorted(labels | known)[:NAMED])
    return Problem(
        f"client '{client}' has the labels {few(sorted(labels))}, client '{other}' has {few(sorted(known))}: no task "
        f"has both; say what means what with --labels '{example}' (or --labels '{keep}' if they are different classes)"
    )


def _means(label: str) -> bool | str:
    """Return True for yes and False for no, in the words that people use; another label means itself."""
    word = label.casefold()
    return True if word in YES else False if word in NO else label


def of_single_clients(counts: dict[str, Counter[str]]) -> list[str]:
    """Say which labels a single client has, where there are several clients."""
    owners: dict[str, list[str]] = {}
    for client, labels in counts.items():
        for label in labels:
            owners.setdefault(label, []).append(client)
    alone = [(label, clients[0]) for label, clients in sorted(owners.items()) if len(clients) == 1]
    if len(counts) < 2 or not alone:
        return []
    listed = [f"'{label}' (client '{client}', {_samples(counts[client][label])})" for label, client in alone]
    return [f"a single client has the label {few(listed)}: nobody else can learn it, or it is spelled differently"]


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}"
