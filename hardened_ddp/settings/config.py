"""All settings of a run, by section.

Each section is a frozen dataclass in its own file; the other layers receive the section that they
need. Names are flat and unique over all sections: `batch_size` is a line of a YAML file and
`--batch_size` a flag.

Does not own: how a setting is declared (declare.py), reading values (cli.py, layers.py), rules that
tie two settings (rules.py).
Read next: schema.py, which reads these dataclasses as a table.
"""

from dataclasses import dataclass, field

from hardened_ddp.settings.data import DataConfig
from hardened_ddp.settings.ddp import DdpConfig
from hardened_ddp.settings.device import DeviceConfig
from hardened_ddp.settings.loop import LoopConfig
from hardened_ddp.settings.model import ModelConfig
from hardened_ddp.settings.optimizer import OptimizerConfig
from hardened_ddp.settings.run import RunConfig
from hardened_ddp.settings.task import TaskConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of one run, by section. The metadata is the section's title."""

    device: DeviceConfig = field(
        default_factory=DeviceConfig, metadata={"title": "Device and process group"}
    )
    data: DataConfig = field(default_factory=DataConfig, metadata={"title": "Data"})
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"title": "Model"})
    task: TaskConfig = field(default_factory=TaskConfig, metadata={"title": "Task and metrics"})
    ddp: DdpConfig = field(default_factory=DdpConfig, metadata={"title": "DistributedDataParallel"})
    optimizer: OptimizerConfig = field(
        default_factory=OptimizerConfig, metadata={"title": "Optimizer and precision"}
    )
    loop: LoopConfig = field(default_factory=LoopConfig, metadata={"title": "Training loop"})
    run: RunConfig = field(
        default_factory=RunConfig, metadata={"title": "Run folder, checkpoints and reports"}
    )
