"""Other forms of a log that must not change what explain says of it.

Owns the forms: prefixes of launchers, schedulers and containers, line ends, colours, healthy lines
between, and logs that were cut.
"""

import json
import random
from collections.abc import Callable, Mapping

HEALTHY = (
    "Epoch 3:  41%|####      | 412/1000 [01:02<01:28,  6.64it/s, loss=0.231, v_num=3]",
    "{'loss': 0.4312, 'grad_norm': 1.7, 'learning_rate': 4.2e-05, 'epoch': 1.2}",
    "INFO:root:step 1200 loss 0.31 val_error 0.087 tokens/s 81234",
    "2026-11-22 08:08:30,123 - train - INFO - epoch 2 iter 120 loss 0.41 error_rate 0.11",
    "/opt/env/lib/python3.11/site-packages/torch/x.py:12: UserWarning: This is slow",
    "node1:211:345 [0] NCCL INFO Channel 00/02 :    0   1",
)
Form = Callable[[str], str]


def each_line(form: Form) -> Form:
    """Change every line."""
    return lambda text: "\n".join(form(line) for line in text.splitlines()) + "\n"


def with_healthy_lines(text: str) -> str:
    """Put training output between the lines."""
    chance = random.Random(len(text))
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if chance.random() < 0.3:
            lines.append(chance.choice(HEALTHY))
    return "\n".join(lines) + "\n"


def with_much_around(text: str) -> str:
    """Put hundreds of lines of training output before and after."""
    many = "\n".join(HEALTHY * 40)
    return f"{many}\n{text}{many}\n"


def cut_top(text: str) -> str:
    """Lose the first lines, up to the second one of the traceback."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "Traceback" in line), 4)
    return "\n".join(lines[start + 1 :]) + "\n"


def cut_end(text: str) -> str:
    """Lose what follows, in the middle of a line."""
    return text.rstrip("\n") + "\n[rank99]:[E1122 08:08:33.1 ProcessGr"


FORMS: Mapping[str, Form] = {
    "as it is": lambda text: text,
    "docker": each_line(lambda line: f"2026-11-22T08:08:33.123456789Z {line}"),
    "kubectl": each_line(lambda line: f"[pod/job-worker-0/pytorch] {line}"),
    "container runtime": each_line(lambda line: f"2026-11-22T08:08:33.123456789Z stderr F {line}"),
    "srun on one task": each_line(lambda line: f"0: {line}"),
    "torchrun tee": each_line(lambda line: f"[default0]:{line}"),
    "colours": each_line(lambda line: f"\x1b[31m{line}\x1b[0m"),
    "windows": each_line(lambda line: line + "\r"),
    "logging": each_line(lambda line: f"[2026-11-22 08:08:33,123][ERROR] {line}"),
    "mpirun": each_line(lambda line: f"[1,0]<stderr>:{line}"),
    "ray": each_line(lambda line: f"(RayTrainWorker pid=3112, ip=10.0.0.7) {line}"),
    "a notebook": each_line(lambda line: f"       {json.dumps(line + chr(10))},"),
    "gcloud's JSON": each_line(lambda line: f'    "textPayload": {json.dumps(line)},'),
    "healthy lines between": with_healthy_lines,
    "much around": with_much_around,
    "cut at the top": cut_top,
    "cut at the end": cut_end,
}
