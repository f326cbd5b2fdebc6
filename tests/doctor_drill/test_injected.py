"""The parts that run inside a drilled process: which batch a forward gets, what may be written."""

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import Subset, TensorDataset

from ddp_doctor.drill.injected import CUT_BYTES, Drilled, _broken, _digest


def drilled(folder: Path, **plan: Any) -> Drilled:
    (folder / "records").mkdir(parents=True)
    order = {"records": f"{folder}/records", "mark": f"{folder}/fired", "rank": 1, "step": 3}
    order |= {"fault": "", "point": "forward", "folders": [f"{folder}/own"], "torn": ""} | plan
    made = Drilled(order)
    made.rank = 1
    return made


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for p in folder.glob("records/*") for line in p.open()]
    return [line for line in lines if line["k"] == kind]


class Iterator:
    """As torch's, with a part of a dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset


def test_a_batch_is_found_by_content_in_a_copy_and_used_once_by_a_retry(tmp_path: Path) -> None:
    made = drilled(tmp_path)
    data = TensorDataset(torch.arange(40.0).reshape(10, 4))
    iterator = Iterator(Subset(data, [9, 8, 7, 6]))
    for indices in ([0, 1], [2, 3]):
        made._deliver(iterator, indices, [torch.stack([data[9 - i][0] for i in indices])])
    copy = torch.stack([data[7][0], data[6][0]]).double().clone()
    found = made._find([[copy], {}])
    assert found["names"] == [7, 6], "the indices of the innermost dataset"
    found["step"] = 1
    assert made._find([copy]) is found, "again in the same step"
    made.num_steps = 1
    assert made._find([copy]) is None, "used by an earlier step"
    assert made._find([torch.ones(3)]) is None


def test_on_one_rank_a_model_without_ddp_uses_its_batch_until_there_is_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    made, data = drilled(tmp_path), TensorDataset(torch.randn(6, 4))
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 2))
    group = SimpleNamespace(init_process_group=lambda: 0, get_rank=lambda: 0)
    group.get_world_size = lambda: 1
    made._patch_group(group)
    made._patch_module(torch.nn.modules.module)
    try:
        for indices in ([0, 1], [2, 3]):
            made._deliver(Iterator(data), indices, [data[indices][0]])
        with torch.no_grad():
            model(data[[0, 1]][0])
        for _ in range(2):
            model(input=data[[2, 3]][0].clone())
        assert [use["names"] for use in told(tmp_path, "use")] == [[2, 3]]
    finally:
        group.init_process_group()
    assert torch.nn.modules.module._global_forward_hooks == {}


def test_samples_of_an_iterable_dataset_are_named_by_their_contents(tmp_path: Path) -> None:
    made = drilled(tmp_path)
    rows = torch.randn(3, 4)
    made._deliver(Iterator(object()), [None, None, None], {"x": rows, "y": torch.zeros(3)})
    made._deliver(Iterator(object()), None, rows.flip(0))
    first, second = (batch["names"] for batch in made._batches)
    assert len(set(first)) == 3
    assert second == first[::-1]


def test_the_step_by_which_a_checkpoint_makes_the_optimizers_state_is_none(tmp_path: Path) -> None:
    made, model = drilled(tmp_path), torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(made._before_step)
    optimizer.register_step_post_hook(made._after_step)
    get_state_dict(model, optimizer)
    assert optimizer.state
    assert made.num_steps == 0
    model(torch.ones(2)).backward()
    optimizer.step()
    assert made.num_steps == 1


def test_a_saving_thread_stays_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit[0]))
    made, parameter = drilled(tmp_path, fault="full-disk"), torch.zeros(1, requires_grad=True)
    made.num_steps, optimizer = 2, torch.optim.SGD([parameter])

    def write(data: int, path: str) -> None:
        made._before_step(optimizer)  # as the main thread does meanwhile
        assert limits == [CUT_BYTES]

    made._patch_save(module := SimpleNamespace(save=write), "save")
    module.save(0, str(tmp_path / "own/a.pt"))
    assert limits[-1] != CUT_BYTES, "and no longer"


def test_any_bit_changes_the_digest_of_weights() -> None:
    weights = [torch.randn(3, 4), torch.randn(5)]
    before = _digest(weights)
    assert _digest([w.clone() for w in weights]) == before
    weights[1].view(torch.int32)[2] ^= 1
    assert _digest(weights) != before
    weights[1].view(torch.int32)[:2] += torch.tensor([7, -7], dtype=torch.int32)
    weights[1].view(torch.int32)[2] ^= 1
    assert _digest(weights) != before, "as the biases of two classes move"
    assert _digest([1.0, *weights]) != _digest([2.0, *weights])


def test_an_output_is_broken_in_each_form_that_is_known() -> None:
    weight = torch.ones(2, requires_grad=True)
    for kind in ("nan", "oom"):
        alone, (first, _) = _broken(weight * 2, kind), _broken((weight * 2, 1), kind)
        for tensor in (alone, first, _broken({"loss": weight * 2, "n": 1}, kind)["loss"]):
            if kind == "nan":
                assert tensor.isnan().all()
                continue
            with pytest.raises(torch.OutOfMemoryError):
                tensor.sum().backward()


def test_nan_of_a_forward_reaches_the_weights_and_is_recorded(tmp_path: Path) -> None:
    class Model(torch.nn.Linear):
        """As DDP, whose forward is replaced."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs)

    made, model = drilled(tmp_path, fault="nan"), Model(2, 1)
    made._patch_ddp(SimpleNamespace(DistributedDataParallel=Model))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(made._before_step)
    optimizer.register_step_post_hook(made._after_step)
    for _ in range(3):
        model(torch.ones(2)).backward()
        optimizer.step()
    assert [update["finite"] for update in told(tmp_path, "update")] == [True, True, False]


def test_writes_outside_also_through_links_are_refused_and_descriptors_not(tmp_path: Path) -> None:
    made = drilled(tmp_path)
    (own := tmp_path / "own").mkdir()
    (own / "link").symlink_to(tmp_path)
    made.hear("open", (str(own / "a"), "w", 0))
    (own / "latest").symlink_to("epoch3.pickle")
    made.hear("open", (str(own / "latest"), "w", 0))
    assert [save["path"] for save in told(tmp_path, "save")] == [f"{own}/epoch3.pickle"]
    made.hear("os.rename", (str(own / "latest"), bytes(own / "b"), -1, -1))
    assert told(tmp_path, "moved")[0]["new"] == f"{own}/b"
    made.hear("open", (str(tmp_path / "a"), "r", 0))
    made.hear("open", (str(tmp_path / "a"), None, os.O_RDONLY))
    made.hear("open", ("/proc/self/fd/1", "w", 0))
    made.hear("os.mkdir", (str(tmp_path), 511, -1))  # it is there already
    made.hear("os.remove", ("a", 7))  # relative to a folder that is open
    for event, args in (
        ("open", (str(own / "link" / "a"), "w", 0)),
        ("open", (str(tmp_path / "a").encode(), None, os.O_RDWR | os.O_CREAT)),
        ("os.rename", (str(own / "a"), str(tmp_path / "b"), -1, -1)),
        ("shutil.rmtree", (str(tmp_path / "b"), None)),
        ("os.mkdir", (str(tmp_path / "b"), 511, -1)),
    ):
        with pytest.raises(PermissionError, match="outside"):
            made.hear(event, args)
    assert {r["path"] for r in told(tmp_path, "outside")} == {f"{tmp_path}/a", f"{tmp_path}/b"}


def test_the_file_that_was_cut_is_read_by_any_of_its_names(tmp_path: Path) -> None:
    made = drilled(tmp_path, torn=str(tmp_path / "epoch-3"))
    (tmp_path / "epoch-3").write_bytes(b"half")
    (tmp_path / "latest.pt").symlink_to("epoch-3")
    os.link(tmp_path / "epoch-3", tmp_path / "best.pt")
    for name in ("none.pt", "records", ""):
        made.hear("open", (f"{tmp_path}/{name}", "rb", 0))
    assert told(tmp_path, "read") == []
    for number, name in enumerate(("epoch-3", "latest.pt", "best.pt"), start=1):
        made.hear("open", (str(tmp_path / name).encode(), "rb", 0))
        assert len(told(tmp_path, "read")) == number, name


def test_a_fault_comes_once_in_its_step_on_its_rank(tmp_path: Path) -> None:
    made = drilled(tmp_path, fault="exception")
    assert made._strike() == ""
    made.num_steps = 2
    made.rank = 0
    assert made._strike() == ""
    made.rank = 1
    with pytest.raises(RuntimeError, match="drill"):
        made._strike()
    assert made._strike() == "", "once, in whatever start"
    assert [record["n"] for record in told(tmp_path, "fault")] == [3]
    other = drilled(tmp_path / "2", fault="nan", point="step")
    other.num_steps = 2
    assert other._strike() == "", "without a forward of DDP there is no output to break"
    assert not (tmp_path / "2/fired").exists()
