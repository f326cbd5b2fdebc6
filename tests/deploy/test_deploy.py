"""The files of deploy/: fields and statuses, without a cluster."""

import ast
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hardened_ddp.reporting.ending import MISTAKE, STOPPED, TRY_AGAIN
from hardened_ddp.settings.schema import SETTINGS
from hardened_ddp_command import split_words
from tests.harness.processes import ROOT
from tests.harness.ranks import run_command

DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def objects_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """Give all mappings in a document."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from parts_of(part)


def plain_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Give what is in a file as objects that Kubernetes itself knows: Jobs and Pods."""
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    for found in objects_of(path):
        if found["kind"] == "Job":
            yield found
        for part in parts_of(found):
            for job in part.get("replicatedJobs", []):
                yield {**head, "spec": job["template"]["spec"]}
            for replica in part.get("pytorchReplicaSpecs", {}).values():
                spec = {**replica["template"]["spec"], "restartPolicy": "Never"}
                yield {**head, "apiVersion": "v1", "kind": "Pod", "spec": spec}


def statuses_of(rule: dict[str, Any]) -> list[int]:
    return list(rule.get("onExitCodes", {}).get("values", []))


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_a_pod_is_not_root_has_shared_memory_and_time_to_save(path: Path) -> None:
    jobs = list(plain_objects(path))
    assert jobs
    for job in jobs:
        spec = job["spec"] if job["kind"] == "Pod" else job["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["restartPolicy"] == "Never"
        mounts = {m["mountPath"] for c in spec["containers"] for m in c["volumeMounts"]}
        assert mounts == {"/dev/shm", "/workspace/runs"}
        words = [w for part in parts_of(objects_of(path)) for w in part.get("args", [])]
        graces = [w for w in words if w.startswith(("--stop_grace_s=", "--shutdown_timeout="))]
        assert {int(w.partition("=")[2]) < spec["terminationGracePeriodSeconds"] for w in graces}
        assert len(graces) >= 2


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_each_status_is_told_apart(path: Path) -> None:
    rules = [rule for part in parts_of(objects_of(path)) for rule in part.get("rules", [])]
    if path.stem == "pytorchjob":
        assert "status=$((status + 128))" in path.read_text()
        return
    by_code = {code: rule["action"] for rule in rules for code in statuses_of(rule)}
    assert by_code.keys() == {MISTAKE, STOPPED, TRY_AGAIN}
    assert by_code[MISTAKE] == "FailJob"
    if path.stem == "job":
        assert by_code[STOPPED] == by_code[TRY_AGAIN] == "Ignore"
        return
    sets = {rule["name"]: rule for rule in rules if "name" in rule}
    assert sets["mistake"]["action"] == "FailJobSet"
    assert sets["again"]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert sets["again"]["onJobFailureMessagePatterns"] == ["exit code (3|75) "]


def test_the_arguments_exist() -> None:
    for path in KUBERNETES:
        for part in parts_of(objects_of(path)):
            words = [word for word in part.get("args", []) if word.startswith("--")]
            _, own = split_words(words)
            assert {word[2:].partition("=")[0] for word in own} <= SETTINGS.keys()


def test_the_wrapper_of_a_pytorchjob_maps_statuses_and_passes_sigterm_on(tmp_path: Path) -> None:
    script = objects_of(DEPLOY / "kubernetes" / "pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"]
    text = script["Master"]["template"]["spec"]["containers"][0]["args"][0]
    command = tmp_path / "hardened-ddp"
    command.write_text(
        '#!/bin/sh\ntrap "exit 3" TERM\n[ "$1" = stop ] && kill $PPID; sleep $2 & wait; exit $1\n'
    )
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for words, status in (
        (["75", "0"], 203),
        (["0", "0"], 0),
        (["2", "0"], 2),
        (["stop", "1000"], 131),
    ):
        done = subprocess.run(["sh", "-c", text, "x", *words], env=env, check=False, timeout=60)
        assert done.returncode == status, words


@pytest.mark.slow
@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_the_schemas_of_kubernetes_accept_each_job_and_pod(path: Path, tmp_path: Path) -> None:
    validate = shutil.which("kubernetes-validate")
    if validate is None:
        pytest.skip("there is no kubernetes-validate: see .ci/run")
    for index, found in enumerate(plain_objects(path)):
        place = tmp_path / f"{index}.json"
        place.write_text(json.dumps(found))
        run_command([validate, "--strict", place], timeout_s=60).ok()


@pytest.mark.slow
def test_the_dockerfile_has_no_mistakes_that_hadolint_knows() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("there is no hadolint: see .ci/run")
    run_command([hadolint, DEPLOY / "Dockerfile"], timeout_s=60).ok()


def test_the_image_has_an_init_no_root_and_any_base() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert lines.index("FROM ${BASE}") > next(i for i, li in enumerate(lines) if "ARG BASE=" in li)
    assert "USER 1000:1000" in lines
    assert json.loads(lines[-1].removeprefix("ENTRYPOINT ")) == ["tini", "--", "hardened-ddp"]
    service = objects_of(DEPLOY / "compose.yaml")[0]["services"]["train"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_skypilot_recovers_the_statuses_that_ask_for_it() -> None:
    task = objects_of(DEPLOY / "skypilot.yaml")[0]
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [STOPPED, TRY_AGAIN]
    assert "--stop_status 3" in task["run"]
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)


def test_the_entry_for_ray_is_python_and_starts_the_command() -> None:
    tree = ast.parse((DEPLOY / "ray_train.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {"hardened_ddp_command", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= texts
