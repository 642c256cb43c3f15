"""Which steps meet each two values? A covering array of strength two, drawn greedily.

A backend may serve two values alone and be wrong for the pair. There are many pairs, but a step covers
a pair for each two of its values. So few steps cover all pairs (AETG, Cohen et al., 1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Choice = dict[str, Any]
"""A value of each name, and of each group of rows a list of tuples."""


class Covering:
    """Which pairs of values are left?

    - `values`: those of each name; a pair is of two names.
    - `rows`: groups of a step's rows. Each has the names that give a row its values, and the most rows.
      Two rows have no pair, because one row's result depends on no other row.
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        rows: Mapping[str, tuple[tuple[str, ...], int]],
        seed: int,
    ):
        self.values = {name: tuple(dict.fromkeys(some)) for name, some in values.items()}
        self.rows, self.random = rows, np.random.Generator(np.random.PCG64(seed))
        self.ids: dict[str, dict[Any, int]] = {}
        owners: list[str] = []
        for name, some in self.values.items():
            self.ids[name] = {value: len(owners) + index for index, value in enumerate(some)}
            owners += [name] * len(some)
        of_rows = {name: group for group, (names, _) in rows.items() for name in names}
        self.plain = [name for name in self.values if name not in of_rows]
        name_of, group_of = np.array(owners), np.array([of_rows.get(name, "") for name in owners])
        either = (group_of[:, None] != "") & (group_of != "")
        self.left = (name_of[:, None] != name_of) & ~(either & (group_of[:, None] != group_of))

    def draw(self, allows: Callable[[Choice], bool], any_value: bool = True) -> Iterator[Choice]:
        """Yield choices that each meet many remaining pairs, until no choice can meet another one.

        - `allows`: whether a choice, which may lack names and rows, can become one.
        - `any_value`: if several values meet equally many pairs, take any; else the name's first one.

        Pass a choice that ran to `meet`. If a choice doesn't run, its first pair is dropped.
        """
        hopeless = np.zeros_like(self.left)
        while (left := self.left & ~hopeless).any():
            count = left.sum(1) + self.random.random(len(left))
            one = int(count.argmax())
            pair = one, int(np.where(left[one], count, -1.0).argmax())
            choice = self._choice(pair, allows, 0.9 * any_value)
            if choice is not None:
                yield choice
            if self.left[pair]:
                hopeless[pair] = hopeless[pair[::-1]] = True

    def meet(self, choice: Choice) -> None:
        """Take a choice's pairs from those that are left; it may lack names and rows."""
        ids = [self.ids[name][choice[name]] for name in self.plain if name in choice]
        self.left[np.ix_(ids, ids)] = False
        for group, (names, _) in self.rows.items():
            for row in choice.get(group, ()):
                own = [*ids, *(self.ids[n][value] for n, value in zip(names, row, strict=True))]
                self.left[np.ix_(own, own)] = False

    def _choice(
        self, pair: tuple[int, int], allows: Callable[[Choice], bool], noise: float
    ) -> Choice | None:
        """Return a choice that has two values, None where none may."""
        choice: Choice = {}
        for group, (names, _) in self.rows.items():
            own = [{v: i for v, i in self.ids[name].items() if i in pair} for name in names]
            row = (
                next(iter(here or self.ids[name])) for here, name in zip(own, names, strict=True)
            )
            choice[group] = [tuple(row)] if any(own) else []
        ids: list[int] = []
        order = [self.plain[n] for n in self.random.permutation(len(self.plain))]
        for name in sorted(order, key=lambda name: not {*pair} & {*self.ids[name].values()}):
            some = {v: i for v, i in self.ids[name].items() if i in pair} or self.ids[name]
            for value, number in self._ranked(some, ids, noise):
                choice[name] = value
                if allows(choice):
                    ids.append(number)
                    break
            else:
                return None
        for group, (names, most) in self.rows.items():
            while len(choice[group]) < most and self._row(choice, group, names, ids, allows, noise):
                pass
        return choice

    def _row(
        self,
        choice: Choice,
        group: str,
        names: tuple[str, ...],
        ids: list[int],
        allows: Callable[[Choice], bool],
        noise: float,
    ) -> bool:
        """Append a row that meets pairs that are left; returns whether there is one."""
        rows, own = choice[group], [*ids]
        rows.append(())
        for index, name in enumerate(names):
            before, met = rows[-1], {row[index] for row in rows[:-1]}
            some = {v: i for v, i in self.ids[name].items() if v not in met}
            for value, number in self._ranked(some, own, noise):
                rows[-1] = (*before, value)
                if allows(choice):
                    own.append(number)
                    break
            else:
                break
        row = own[len(ids) :]
        if len(row) == len(names) and self.left[np.ix_(own, row)].any():
            return True
        rows.pop()
        return False

    def _ranked(
        self, some: Mapping[Any, int], ids: Sequence[int], noise: float
    ) -> list[tuple[Any, int]]:
        """Return values and their numbers: those first that meet most pairs with `ids`."""
        each = list(some.items())
        gain = self.left[[number for _, number in each]][:, ids].sum(1)
        gain = gain + noise * self.random.random(len(each))
        return [each[index] for index in np.argsort(-gain, kind="stable")]
