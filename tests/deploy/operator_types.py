"""What operators make of YAML, by the types that they publish: prints each field that they drop.

Run by the Python of .venv-tools (.ci/run), which has the packages kubeflow-trainer-api (Trainer and
JobSet) and kubeflow-training (PyTorchJob). What the types refuse is an exception.
"""

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kubernetes.client
import yaml
from kubeflow.training import models as of_training_operator
from kubeflow_trainer_api import models

NAMES = {
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}


def dropped(before: Any, after: Any, place: str) -> Iterator[str]:  # Any: JSON
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from dropped(value, after.get(name), f"{place}.{name}")
    elif isinstance(before, list) and isinstance(after, list):
        for one, other in zip(before, after, strict=True):
            yield from dropped(one, other, place)
    elif before != after:
        yield f"{place}: {before!r}"


def read_back(content: dict[str, Any]) -> Any:  # Any: JSON
    if content["kind"] != "PyTorchJob":
        return getattr(models, NAMES[content["kind"]]).from_dict(content).to_dict()
    vars(kubernetes.client.models).update(vars(of_training_operator))  # its client looks there
    client = kubernetes.client.ApiClient()
    found = client.deserialize(SimpleNamespace(data=json.dumps(content)), "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(found)


for each in yaml.safe_load_all(sys.stdin):
    for line in dropped(each, read_back(each), each["kind"]):
        print(line)
