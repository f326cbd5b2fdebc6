"""Channels last by a rule, and memory that is kept from step to step."""

import pytest
import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.model.precision import Precision
from hardened_ddp.preflight import memory_format
from hardened_ddp.preflight.memory_format import choose_channels_last, pays
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import Config, DataConfig, ModelConfig
from hardened_ddp.task.classification import Classification

CPU = torch.device("cpu")
PLAIN, ALONE = Config(), Group(Launch(), CPU)


class Net(nn.Module):
    """A convolution with a BatchNorm. needs: what needs the usual order of memory."""

    def __init__(self, kernel: int = 3, needs: str = "") -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, kernel, padding=kernel // 2), nn.BatchNorm2d(4)
        self.head, self.needs = nn.Linear(4 * 36, 3), needs

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.needs == "random":  # nobody can tell
            images = images + torch.randn_like(images)
        features = self.norm(self.conv(images))
        if self.needs == "strides":  # turned images, as in the usual order
            features = features.as_strided(features.shape, (144, 36, 1, 6))
        uses_view = self.needs == "view" or (self.needs == "view in training" and self.training)
        flat = features.view(len(images), -1) if uses_view else features.flatten(1)
        return self.head(flat)


def choose(
    model: nn.Module,
    config: Config = PLAIN,
    *,
    began_with: bool | None = None,
    group: Group = ALONE,
) -> bool:
    batch = Batch(torch.randn(2, 3, 6, 6), torch.tensor([0, 2]), torch.arange(2))
    random = torch.get_rng_state()
    trial = Trial(model, Classification(num_classes=3), Precision("off", CPU), group)
    found = choose_channels_last(trial, batch, config=config, began_with=began_with)
    assert torch.equal(torch.get_rng_state(), random)
    return found


# A sample is 3 x 36 values before the convolution and 4 x 36 after it: 252.
# A kernel of 3 x 3 has 3 * 4 * 9 = 108 weights, one of 11 x 11 has 1,452, one of 1 x 1 none.
@pytest.mark.parametrize(
    ("kernel", "batch_size", "is_faster"), [(3, 1, True), (11, 5, False), (11, 6, True)]
)
def test_values_of_images_decide_against_weights_of_kernels_and_the_trial_leaves_no_trace(
    kernel: int, batch_size: int, is_faster: bool
) -> None:
    model = Net(kernel=kernel)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert choose(model, Config(data=DataConfig(batch_size=batch_size))) == is_faster
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last) == is_faster
    assert model.conv.weight.is_contiguous() != is_faster
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.conv._forward_hooks


def test_on_a_gpu_it_goes_with_16_bits() -> None:
    group = Group(Launch(), CPU)
    group.device = torch.device("cuda")
    for num_values, amp, is_faster in ((1, "bf16", True), (1, "off", False), (0, "bf16", False)):
        trial = Trial(Net(), Classification(num_classes=3), Precision(amp, CPU), group)
        assert pays(trial, 9, num_values) == is_faster


def test_one_rank_where_it_is_slower_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [{"found": [True]}, {"found": [[10**9, 1]]}]
    monkeypatch.setattr(Group, "gather_json", lambda group, mine: [mine, others.pop(0)])
    group = Group(Launch(), CPU)
    group.world_size = 2
    assert not choose(Net(), group=group)
    assert not others  # nothing else decided it


@pytest.mark.parametrize("asked", [True, False])
def test_what_was_asked_for_is_not_tried(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    monkeypatch.setattr(memory_format, "pays", lambda trial, *numbers: not asked)
    assert choose(Net(), Config(model=ModelConfig(channels_last=asked))) == asked
    assert choose(Net(), began_with=asked) == asked


def test_without_images_or_when_compiled_or_needed_the_usual_order_stays() -> None:
    assert not choose(nn.Sequential(nn.Flatten(), nn.Linear(108, 3)))
    assert not choose(Net(), Config(model=ModelConfig(compile=True)))
    for needs in ("view", "view in training", "strides", "random"):
        assert not choose(model := Net(needs=needs))
        assert model.conv.weight.is_contiguous()


def test_a_rank_calls_the_model_as_often_until_all_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # WHY: in a model with collectives, ranks that find otherwise would wait for each other.
    calls: list[object] = []
    agreed_after: list[int] = []

    def gather(group: Group, mine: object) -> list[object]:
        agreed_after.append(len(calls))
        return [mine]

    monkeypatch.setattr(Group, "gather_json", gather)
    for model in (Net(), Net(needs="strides"), Net(needs="random")):
        calls.clear()
        model.register_forward_hook(lambda *call: calls.append(call))
        choose(model)
    assert agreed_after == [2, 3, 2, 2]
