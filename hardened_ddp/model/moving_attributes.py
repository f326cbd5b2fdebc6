"""Plain attributes that change in forward: step counters, private generators, running sums.

Owns finding them in a model and in the user's task, and when they are put back: after a trial,
before a retry, from a checkpoint. Tensors are not meant here: see moving_buffers.py.
What changes is found in three ways. A trial shows what changes in each forward. The code of the
user's classes shows what methods assign, however late, and each generator may be used: both are
copied before each step too. All else is compared when a checkpoint is saved, and before a retry.
What goes wrong here: an object of a library, or written in C. It can't be copied: it is named.
Read next: plain_values.py.
"""

import contextlib
import dis
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from hardened_ddp.errors import CheckpointMismatchError
from hardened_ddp.model.plain_values import (
    ABSENT,
    GENERATORS,
    Copy,
    as_json,
    copy_of,
    from_json,
    is_users,
    kept_parts,
    kind_of,
    put_back,
)
from hardened_ddp.model.reach import OF_MODULES
from hardened_ddp.ranks.group import Group
from hardened_ddp.reporting.log import ON_EVERY_RANK

log = logging.getLogger(__name__)

Copies = dict[str, Copy]

_SHOWN = 8
TASK = "(task)."  # begins the names of the task's attributes
_OURS = ("hardened_ddp", "builtins")
_LATE = "and began to in a step that is retried, in which they are not as before it"
_OWN = (
    "to other values on each rank. A checkpoint holds those of one rank, which all ranks take at a "
    "resume"
)
_UNSAVED = "which no checkpoint holds. A resumed run begins with those that the constructor makes"


class MovingAttributes:
    """The plain attributes of a model, and of a task of the user's. The default has none."""

    def __init__(self, model: nn.Module, task: object = None) -> None:
        self._owners = _owners_in(model, "")
        if any(cls.__module__.split(".")[0] not in _OURS for cls in type(task).__mro__):
            self._owners[TASK] = task
            for name, part in vars(task).items():
                if isinstance(part, nn.Module) and part is not model:
                    self._owners |= _owners_in(part, f"{TASK}{name}.")
        self._first = self._last = self._copy_all()
        # What is copied before each step.
        self.watched: tuple[str, ...] = tuple(sorted(self._candidates()))

        # What changes in forward, and is kept equal on all ranks. The same on all ranks.
        self.shared: tuple[str, ...] = ()
        self._moving: set[str] = set()
        self._told: set[str] = set()
        # What is watched at the last step boundary, while a step is under way.
        self._before: Copies | None = None

    def begin_step(self) -> Copies:
        """Copy what may change in a step, for put_back."""
        self._before = {name: self._copy(name) for name in self.watched}
        return self._before

    def end_step(self) -> None:
        """Note that the values of now are those of a step boundary."""
        self._before = None

    def put_back(self, copies: Copies) -> None:
        """Restore what begin_step has copied. Names what changed besides: it can't be restored."""
        now = self._copy_all()
        late = [name for name in _changed(self._last, now) if name not in copies]
        self._put(copies)
        self._before, self._last = copies, self._copy_all()
        self._tell(set(self._take_up(late)), _LATE)

    def reset(self) -> None:
        """Restore all attributes as they were built: after the trials."""
        self._put({n: self._first.get(n, ABSENT) for n in _changed(self._first, self._copy_all())})

    def note_built(self) -> None:
        """Take what is there now for what was built: with what the task has learned."""
        self._first = self._last = self._copy_all()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore what changes in training's forward: after an evaluation."""
        self._before = {name: self._copy(name) for name in sorted(self._moving)}
        try:
            yield
        finally:
            self._put(self._before)
            self._before, self._last = None, self._copy_all()

    def state(self) -> dict[str, Any]:
        """Return what is not as it was built, at the last step boundary, as JSON."""
        now = {**self._copy_all(), **(self._before or {})}
        changed = _changed(self._first, now)
        self._take_up(changed)
        found = {n: as_json(now.get(n, ABSENT), self._first.get(n)) for n in changed}
        return {name: data for name, data in found.items() if data != ["kept", None]}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over what state returned; all else becomes as it was built.

        Raises CheckpointMismatchError.
        """
        self.reset()
        try:
            for name, data in saved.items():
                self._put_json(name, data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointMismatchError(
                f"the checkpoint's value of the attribute {name} does not fit the model: {error!r}",
                fix="has the model's code changed since? Use the code of that time",
            ) from error
        self._before, self._last = None, self._copy_all()
        self._take_up(list(saved))

    def changes(self) -> list[Any]:
        """Return what has changed since it was built, as JSON for agree. Rank-local."""
        self._last = now = self._copy_all()
        moved = _changed(self._first, now)
        pairs = {name: (self._first.get(name, ABSENT), now.get(name, ABSENT)) for name in moved}
        lost = [name for name, (old, new) in pairs.items() if kept_parts(old) != kept_parts(new)]
        names = sorted({*moved, *self.watched})
        return [{name: _digest(as_json(now.get(name, ABSENT))) for name in names}, moved, lost]

    def agree(self, everyone: Sequence[list[Any]]) -> None:
        """Take up the changes of all ranks, the same on all, and say what can't be resumed."""
        self.watched = tuple(sorted({name for mine, _, _ in everyone for name in mine}))
        self._moving = {name for _, mine, _ in everyone for name in mine}
        unsaved = {name for _, _, mine in everyone for name in mine}
        own = {n for n in self.watched if len({mine.get(n) for mine, _, _ in everyone}) > 1}
        self.shared = tuple(n for n in self.watched if n not in unsaved | own)
        if not self._moving - unsaved - own:
            self.shared = ()
        self._tell(unsaved, _UNSAVED)
        self._tell((own & self._moving) - unsaved, _OWN)

    def equalize(self, group: Group, *, is_even: bool) -> None:
        """Give all ranks those of rank 0, after a step with uneven shares. Collective: all ranks.

        WHY: a rank without a sample runs no forward. is_even: all ranks have run the same
        forwards; what differs then is meant to. Rank 0 has the largest share of each step.
        """
        mine = {name: as_json(self._copy(name)) for name in self.shared}
        table = torch.zeros(group.world_size, dtype=torch.int64)
        table[group.launch.rank] = _digest(mine)
        if len(set(group.sum_(table).tolist())) == 1:  # collective
            return
        everyone = group.gather_json(mine)  # collective
        differing = {n for n in self.shared if any(each[n] != everyone[0][n] for each in everyone)}
        if is_even:
            self.shared = tuple(name for name in self.shared if name not in differing)
            self._tell(differing, _OWN)
        elif not group.is_main:
            for name in differing:
                self._put_json(name, everyone[0][name])

    def _tell(self, names: set[str], text: str) -> None:
        if new := sorted(names - self._told):
            self._told |= names
            log.warning(
                "forward changes attributes of the model, %s: %s. If forward reads them, the "
                "weights then differ from those of an unbroken run",
                text,
                ", ".join(new[:_SHOWN]),
                extra=ON_EVERY_RANK,
            )

    def _take_up(self, names: Sequence[str]) -> list[str]:
        """Copy these too before each step; return those that are new."""
        new = sorted(set(names) - set(self.watched))
        self.watched = (*self.watched, *new)
        return new

    def _put(self, copies: Copies) -> None:
        for name, copy in copies.items():
            owner, attribute = self._place(name)
            if copy is not ABSENT:
                owner[attribute] = put_back(copy)
            elif kind_of(owner.get(attribute)) != "kept":
                owner.pop(attribute, None)

    def _put_json(self, name: str, data: Any) -> None:  # Any: JSON
        owner, attribute = self._place(name)
        if data == as_json(ABSENT):
            owner.pop(attribute, None)
        else:
            owner[attribute] = from_json(data, owner.get(attribute))

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        prefix, dot, attribute = name.rpartition(".")
        if attribute in OF_MODULES:
            raise KeyError(name)
        return vars(self._owners[prefix + dot]), attribute

    def _copy(self, name: str) -> Copy:
        owner, attribute = self._place(name)
        return copy_of(owner[attribute]) if attribute in owner else ABSENT

    def _copy_all(self) -> Copies:
        return {name: copy_of(value) for name, _, value in self._plain()}

    def _plain(self) -> Iterator[tuple[str, object, Any]]:  # Any: values of any kind
        """Yield name, owner and value of each plain attribute."""
        for prefix, owner in self._owners.items():
            for name, value in list(vars(owner).items()):
                if not (name in OF_MODULES or isinstance(value, torch.Tensor | nn.Module)):
                    yield f"{prefix}{name}", owner, value

    def _candidates(self) -> Iterator[str]:
        """Yield what methods assign, and all generators: they may begin to change later."""
        for name, owner, value in self._plain():
            cls: Any = type(owner)  # Any: mypy takes a type for no key
            if name.rpartition(".")[2] in _assigned(cls) or kind_of(value) in GENERATORS:
                yield name


def _owners_in(model: nn.Module, prefix: str) -> dict[str, object]:
    """Return each module by the beginning of its attributes' names; torch's have none."""
    return {
        f"{prefix}{name}." if name else prefix: module
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
    }


@cache
def _assigned(cls: Any) -> frozenset[str]:  # Any: mypy takes a type for no key
    """Name the attributes that methods of a class assign, but for its constructor."""
    # WHY no others: a model of a library would pay for it in each step
    own = [vars(base).items() for base in cls.__mro__ if is_users(base.__module__)]
    waiting: list[Any] = [part for parts in own for name, part in parts if name != "__init__"]
    found: set[str] = set()
    while waiting:
        part = waiting.pop()
        part = getattr(part, "__func__", part)
        code = getattr(getattr(part, "__wrapped__", part), "__code__", part)
        if isinstance(code, CodeType):
            found |= {str(i.argval) for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
            waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return frozenset(found)


def _changed(before: Copies, now: Copies) -> list[str]:
    names = dict.fromkeys([*before, *now])
    return [name for name in names if before.get(name, ABSENT) != now.get(name, ABSENT)]


def _digest(data: Any) -> int:  # Any: JSON
    return int.from_bytes(hashlib.sha256(json.dumps(data).encode()).digest()[:7])
