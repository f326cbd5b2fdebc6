"""What step_path.py runs inside of the ranks: a model that watches the code around its forward.

A training run builds it by `--model step_trace:build`. $STEP_TRACE, `WHAT:CHECKOUT:FILE`, says what
is watched, whose code counts, and where rank 0 writes down what it saw. WHAT is

- `step`: from one forward of training to the next, some steps one by one, and the stack of the
  first;
- `save`: each call of Saver.save, and the thread that writes;
- `resume`: the calls in RESUME. They come before there is a model, so for this the ranks start
  this file, which goes on to ddp_training.py.

Owns sys.setprofile. Does not own: what is counted, and the bars (step_path.py).
Ours is what lies in the checkout, this file and a virtual environment aside. A function is known by
its file and qualified name; a lambda or a comprehension counts as the function that it stands in.
"""

import json
import os
import re
import runpy
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

WARM_UP = 20
STEPS = 40
SAVE = "Saver.save"
FIRST_SAVE = 20
"""The step of it; the driver asks for a checkpoint after every so many."""
RESUME = ("open_run", "read_checkpoint", "restore")

Function = tuple[str, str]
Profile = Callable[[FrameType, str, object], None]

_IS_FUNCTION = 0x1  # CO_OPTIMIZED: code of a function, not of a module or of a class
_FOLDED = re.compile(r"(\.<locals>)?\.<(lambda|listcomp|setcomp|dictcomp|genexpr)>.*")


class Watch:
    """Collects the functions of a checkout that are executed. For sys.setprofile."""

    def __init__(self, checkout: str) -> None:
        self.checkout = os.path.realpath(checkout) + os.sep
        # A virtual environment may lie in the checkout, and be a link there.
        self.environment = (sys.prefix + os.sep, os.path.realpath(sys.prefix) + os.sep)
        self.seen: set[Function] = set()
        self._names: dict[CodeType, Function | None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take a call or a return; the frame of a return may be older than the watch."""
        if (name := self.name(frame.f_code)) is not None:
            self.seen.add(name)

    def name(self, code: CodeType) -> Function | None:
        """Give the file and the function; None if it is not ours."""
        if code not in self._names:
            path = code.co_filename
            is_ours = path.startswith(self.checkout) and path != __file__
            is_ours = is_ours and not path.startswith(self.environment)
            self._names[code] = (
                (path.removeprefix(self.checkout), _FOLDED.sub("", code.co_qualname))
                if is_ours and code.co_flags & _IS_FUNCTION
                else None
            )
        return self._names[code]

    def within(self, functions: tuple[str, ...]) -> Profile:
        """Give a profile function that collects only while one of these functions runs."""
        open_frames: list[FrameType] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            name = self.name(frame.f_code)
            if name is not None and event == "call" and name[1] in functions:
                open_frames.append(frame)
            if open_frames:
                self(frame, event, None)
            if event == "return" and open_frames and open_frames[-1] is frame:
                open_frames.pop()

        return note


class StepWatch:
    """Watches STEPS steps after WARM_UP, each from its forward to the next one's.

    WHY several: some do what is due only now and then, such as an agreement on stopping.
    """

    def __init__(self, checkout: str, file: str) -> None:
        self.checkout, self.file = checkout, file
        self.num_forwards = 0
        self.stack: list[Function] = []
        self.watches: list[Watch] = []

    def forward(self) -> None:
        """Take a forward; those of training have fit above them."""
        watch = Watch(self.checkout)
        stack = frames_of_fit(watch)
        if stack is None:
            return
        self.num_forwards += 1
        if self.num_forwards == WARM_UP + STEPS + 1:
            sys.setprofile(None)
            steps = [sorted(each.seen) for each in self.watches]
            _write(self.file, {"stack": self.stack, "steps": steps})
        elif WARM_UP < self.num_forwards <= WARM_UP + STEPS:
            self.stack = stack[1:]
            watch.seen.add(stack[0])  # WHY: fit goes on all the time; it has no call, no return
            self.watches.append(watch)
            sys.setprofile(watch)


class SaveWatch:
    """Watches saves, from a forward after the first save to the end of the process.

    The first one of a process also lays out the file, and learns which process this is.
    """

    def __init__(self, checkout: str, file: str) -> None:
        self.file = file
        self.main = Watch(checkout)
        self.threads: dict[threading.Thread, Watch] = {}
        self.num_forwards = 0
        of_thread = threading.local()

        def note(frame: FrameType, event: str, _: object) -> None:
            if not hasattr(of_thread, "watch"):
                of_thread.watch = self.threads[threading.current_thread()] = Watch(checkout)
            of_thread.watch(frame, event, None)

        threading.setprofile(note)
        Finalize(None, self.write, exitpriority=0)  # also where a rank is a forked process

    def forward(self) -> None:
        """Begin to watch, once it is time."""
        if frames_of_fit(self.main) is None:
            return  # of a trial: how many there are does not matter
        self.num_forwards += 1
        if self.num_forwards == FIRST_SAVE + 5:
            while not (writers := self.writers()):  # it may not have begun yet
                time.sleep(0.01)
            for thread in writers:
                thread.join()
            self.threads.clear()  # of the first save
            sys.setprofile(self.main.within((SAVE,)))

    def writers(self) -> dict[threading.Thread, set[Function]]:
        """Give what each thread that writes a checkpoint has executed."""
        return {
            thread: watch.seen
            for thread, watch in self.threads.copy().items()
            if any("/checkpoint/" in file for file, _ in watch.seen.copy())
        }

    def write(self) -> None:
        """Write down what was seen."""
        sys.setprofile(None)
        writers = self.writers().values()
        if writers:  # else the driver says that nothing was seen: half a save is no figure
            _write(self.file, {"save": sorted(self.main.seen.union(*writers))})


class ResumeWatch:
    """Watches a resume, from the start of the process to the first forward of training."""

    def __init__(self, checkout: str, file: str) -> None:
        self.file = file
        self.watch = Watch(checkout)
        sys.setprofile(self.watch.within(RESUME))

    def forward(self) -> None:
        """Write down what was seen."""
        if frames_of_fit(self.watch) is not None and sys.getprofile() is not None:
            sys.setprofile(None)
            _write(self.file, {"resume": sorted(self.watch.seen)})


def frames_of_fit(watch: Watch) -> list[Function] | None:
    """Name our frames from fit, included, to the model's forward. None: fit is not above."""
    stack: list[Function] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (name := watch.name(frame.f_code)) is not None:
            stack.insert(0, name)
            if name == ("ddp_training.py", "fit"):
                return stack
        frame = frame.f_back
    return None


def build(num_classes: int, input_shape: tuple[int, ...]) -> torch.nn.Module:
    """Build the model, for --model."""
    return WatchingModel(num_classes, input_shape)


class WatchingModel(torch.nn.Module):
    """A small classifier that tells its watch of each forward."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        size = torch.Size(input_shape).numel()
        self.hidden = torch.nn.Linear(size, 32)
        self.head = torch.nn.Linear(32, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        if _watch is not None:
            _watch.forward()
        logits: torch.Tensor = self.head(self.hidden(images.flatten(1)).relu())
        return logits


def _write(file: str, seen: dict[str, Any]) -> None:  # Any: JSON
    Path(file).write_text(json.dumps(seen), encoding="utf-8")


def _start() -> StepWatch | SaveWatch | ResumeWatch | None:
    """Start the watch that $STEP_TRACE asks for, on rank 0."""
    if os.environ.get("RANK") != "0" or "STEP_TRACE" not in os.environ:
        return None
    what, checkout, file = os.environ["STEP_TRACE"].split(os.pathsep)
    kinds = {"step": StepWatch, "save": SaveWatch, "resume": ResumeWatch}
    return kinds[what](checkout, file)


if __name__ == "__main__":
    import step_trace  # noqa: F401  # WHY: the model is found by this name, and it has the watch

    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
else:
    _watch = _start()
