"""Programs that fail in mixed precision, in numbers, or in torch.compile."""

import torch
from torch import nn

from tests.explain.reproducers import reproduces


def _parts(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.SGD]:
    model = nn.Linear(2, 2).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@reproduces("amp-unscale-twice")
def amp_unscale_twice() -> None:
    model, optimizer = _parts()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


@reproduces("amp-no-inf-checks")
def amp_no_inf_checks() -> None:
    _, optimizer = _parts()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1, requires_grad=True).sum())
    scaler.step(optimizer)


@reproduces("amp-fp16-weights")
def amp_fp16_weights() -> None:
    model, optimizer = _parts(torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2, dtype=torch.float16)).sum()).backward()
    scaler.unscale_(optimizer)


@reproduces("amp-nan")
def amp_nan() -> None:
    weight = nn.Parameter(torch.tensor([float("inf")]))
    weight.grad = torch.tensor([float("nan")])
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


@reproduces("amp-nan")
def amp_nan_anomaly() -> None:
    with torch.autograd.set_detect_anomaly(True):
        x = torch.zeros(1, requires_grad=True)
        (x.sqrt() * 0).sum().backward()


@reproduces("compile-failed")
def compile_failed() -> None:
    def backend(graph: object, inputs: object) -> object:
        raise ValueError("this backend has a bug")

    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))  # type: ignore[arg-type]


@reproduces("compile-failed")
def compile_graph_break() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2))


reproduces("amp-dtype")(lambda: nn.Linear(2, 2)(torch.ones(1, 2, dtype=torch.bfloat16)))
