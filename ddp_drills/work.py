"""What a drill trains, and the flags of its runs. No torch: wrong settings are reported at once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Defaults that the user may override.
DEFAULTS: Mapping[str, str] = {
    "batch_size": "36",
    "num_workers": "0",
    "max_steps": "27",
    "epochs": "1000",  # WHY so many: max_steps ends the run
}
ALWAYS = (
    *("--run_name", "drill", "--ledger", "--log_interval", "5", "--checkpoint_every_steps", "5"),
    *("--tensorboard", "false", "--stop_grace_s", "6"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a drill trains."""

    num_ranks: int = 2
    model: str = "mlp"
    model_args: Mapping[str, Any] = field(default_factory=dict)  # Any: arguments of a callable
    dataset: str = "digits"
    dataset_args: Mapping[str, Any] = field(default_factory=dict)  # Any: as above
    may_download: bool = True
    streaming: bool = False
    # Settings, as on the command line.
    flags: tuple[str, ...] = tuple(f"--{name}={value}" for name, value in DEFAULTS.items())

    def command(self, board: Path, output: Path) -> list[str]:
        """Return the flags of a run whose model and dataset inject the faults of board."""
        model = {"inner": self.model, "inner_args": dict(self.model_args), "board": str(board)}
        inner = {
            "dataset": self.dataset,
            "dataset_args": dict(self.dataset_args),
            "download": self.may_download,
            "streaming": self.streaming,
        }
        words = [*self.flags, *ALWAYS, "--output_dir", str(output)]
        words += ["--model", "ddp_drills.wrappers:model"]
        words += ["--model_args", json.dumps(model)]
        words += ["--dataset", "ddp_drills.wrappers:dataset"]
        return [*words, "--dataset_args", json.dumps({"inner": inner, "board": str(board)})]
