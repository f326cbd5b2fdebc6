"""The files of deploy/: fields and statuses, without a cluster."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from hardened_ddp.settings.schema import SETTINGS
from hardened_ddp_command import split_words
from tests.documents import TROUBLES, text_of
from tests.harness.processes import ROOT
from tests.harness.ranks import held_port, run_command, start_program
from tests.run_folder import only_run, read_summary

DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
EACH = pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
POINTS = ["--dataset", "tests.plugins:points", "--model", "mlp", "--num_workers", "0"]
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def parts_of(path: Path) -> Iterator[dict[str, Any]]:
    """Give all mappings in a file, at any depth."""
    left: list[Any] = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value
        left = [part for part in left if isinstance(part, dict | list)]
        if isinstance(value, dict):
            yield value


def plain_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Give what is in a file as objects that Kubernetes itself knows: Jobs and Pods."""
    for part in parts_of(path):
        if "podFailurePolicy" in part:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": part}
        for replica in part.get("pytorchReplicaSpecs", {}).values():
            spec = {**replica["template"]["spec"], "restartPolicy": "Never"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}


@EACH
def test_a_pod_is_not_root_has_shared_memory_and_time_to_save(path: Path) -> None:
    found = list(plain_objects(path))
    assert found
    words = [word for part in parts_of(path) for word in part.get("args", [])]
    flags = dict(word.split("=") for word in words if word.startswith("--"))
    for each in found:
        spec = each["spec"] if each["kind"] == "Pod" else each["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["restartPolicy"] == "Never"
        mounts = {m["mountPath"] for c in spec["containers"] for m in c["volumeMounts"]}
        assert mounts == {"/dev/shm", "/workspace/runs"}
        for name in ("--stop_grace_s", "--shutdown_timeout"):
            assert int(flags[name]) < spec["terminationGracePeriodSeconds"]
    _, own = split_words([word for word in words if word.startswith("--")])
    assert {word[2:].partition("=")[0] for word in own} <= SETTINGS.keys()


def dropped_fields(text: str) -> str:
    """Return what the operators' published types drop or refuse; empty if it is nothing."""
    validate = shutil.which("kubernetes-validate")
    if validate is None:
        pytest.skip("there is no kubernetes-validate and what is beside it: see .ci/run")
    argv = [Path(validate).with_name("python"), Path(__file__).with_name("operator_types.py")]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120}
    return subprocess.run(argv, input=text, check=False, **how).stdout


@EACH
def test_an_object_of_an_operator_has_names_that_it_takes(path: Path) -> None:
    contents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for content in contents:
        if content["kind"] == "TrainJob":
            assert content["spec"]["runtimeRef"]["name"] == contents[0]["metadata"]["name"]
            assert type(content["spec"]["trainer"]["numProcPerNode"]) is int  # "auto" is refused
        if content["kind"] == "PyTorchJob":
            specs = content["spec"]["pytorchReplicaSpecs"].values()
            assert {spec["restartPolicy"] for spec in specs} == {"ExitCode"}


@pytest.mark.slow
def test_the_types_of_the_operators_keep_each_field() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in KUBERNETES}
    assert not dropped_fields("\n---\n".join(texts.values()))
    wrong = {"job": ("backoffLimit", "backoffLimits"), "jobset": ("maxRestarts", "maxRestart")}
    wrong |= {"trainjob": ("numNodes", "numNode"), "pytorchjob": ("restartPolicy", "restartPolice")}
    told = dropped_fields("\n---\n".join(texts[n].replace(*wrong[n]) for n in wrong))
    assert all(f".{name}: " in told for _, name in wrong.values()), told


@EACH
def test_each_status_is_told_apart(path: Path) -> None:
    rules = [rule for part in parts_of(path) for rule in part.get("rules", [])]
    told = [(r["onExitCodes"]["values"], r["action"]) for r in rules if "onExitCodes" in r]
    by_code = {code: action for codes, action in told for code in codes}
    again = "Ignore" if path.stem == "job" else "FailJob"  # a JobSet tells them by the message
    assert by_code == ({} if path.stem == "pytorchjob" else {2: "FailJob", 3: again, 75: again})
    named = [rule for rule in rules if "name" in rule]
    assert all(_RULE_NAME.fullmatch(rule["name"]) for rule in named)
    sets = {rule["action"]: rule["onJobFailureMessagePatterns"] for rule in named}
    wanted = {"FailJobSet": ["exit code 2 "]}
    wanted["RestartJobSetAndIgnoreMaxRestarts"] = ["exit code (3|75) "]
    assert sets == (wanted if path.stem in ("jobset", "trainjob") else {})


def test_the_wrapper_of_a_pytorchjob_maps_statuses_and_passes_sigterm_on(tmp_path: Path) -> None:
    pods = list(plain_objects(DEPLOY / "kubernetes" / "pytorchjob.yaml"))
    text = pods[0]["spec"]["containers"][0]["args"][0]
    program, command = tmp_path / "program.py", tmp_path / "hardened-ddp"
    program.write_text(
        "import os, signal, sys\n"
        "if sys.argv[1] != 'stop':\n"
        "    sys.exit(int(sys.argv[1]))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"  # else it may come too early
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "os._exit(3)\n"
    )
    # WHY a shell's: the first line of a script can't name a Python below a folder with a space
    words = shlex.join([sys.executable, str(program)])
    command.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for word, status in (("75", 203), ("0", 0), ("2", 2), ("stop", 131)):
        done = subprocess.run(["sh", "-c", text, "x", word], env=env, check=False, timeout=60)
        assert done.returncode == status, word


@pytest.mark.slow
def test_kubernetes_schemas_and_hadolint_accept_what_is_there(tmp_path: Path) -> None:
    validate, hadolint = map(shutil.which, ("kubernetes-validate", "hadolint"))
    if validate is None or hadolint is None:
        pytest.skip("there is no kubernetes-validate or hadolint: see .ci/run")
    for path in KUBERNETES:
        for found in plain_objects(path):
            (tmp_path / "x.json").write_text(json.dumps(found))
            run_command([validate, "--strict", tmp_path / "x.json"], timeout_s=60).ok()
    run_command([hadolint, DEPLOY / "Dockerfile"], timeout_s=60).ok()


def test_the_image_compose_and_skypilot_start_the_command() -> None:
    last = (DEPLOY / "Dockerfile").read_text().splitlines()[-1]
    assert json.loads(last.removeprefix("ENTRYPOINT ")) == ["tini", "--", "hardened-ddp"]
    build = next(part for part in parts_of(DEPLOY / "compose.yaml") if "dockerfile" in part)
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    task = {n: v for part in parts_of(DEPLOY / "skypilot.yaml") for n, v in part.items()}
    assert task["recover_on_exit_codes"] == [3, 75]
    assert "hardened-ddp" in task["run"]
    assert "--stop_status 3" in task["run"]
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)


def commands_of(name: str, tmp_path: Path, port: int) -> list[tuple[list[str], dict[str, str]]]:
    """Give what each node of a file runs: its words, and the environment that it finds.

    The variables are those that each operator sets; names of hosts and GPUs become those of here.
    """
    launch = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    shape = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}
    pods = [{**launch, **shape, "PET_NODE_RANK": str(node)} for node in (0, 1)]
    path = DEPLOY / "kubernetes" / f"{name}.yaml"
    if name == "compose":
        services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
        nodes = [services[node]["command"] for node in ("node0", "node1")]
        [told] = [line for line in text_of(TROUBLES).splitlines() if "--nnodes=2" in line]
        assert {w for w in nodes[0] if w.startswith(("--nnodes", "--rdzv"))} < {*told.split()}
        return [([w.replace("node0:29500", f"127.0.0.1:{port}") for w in n], {}) for n in nodes]
    if name == "skypilot":
        return [sky_command(node, tmp_path, port) for node in (0, 1)]
    words = next(part["args"] for part in parts_of(path) if "args" in part)
    if name == "job":  # one pod, which asks for GPUs
        return [([word.replace("=gpu", "=2") for word in words], {})]
    if name == "jobset":
        [given] = [part["env"] for part in parts_of(path) if "env" in part]
        told = {each["name"]: each.get("value") for each in given}
        assert told.keys() == pods[0].keys()
        assert {key: told[key] for key in shape} == shape
    if name == "pytorchjob":  # behind its wrapper, which a test above runs
        old = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
        pods = [{**pod, **old, "RANK": pod["PET_NODE_RANK"]} for pod in pods]
        words = words[2:]
    return [(words, pod) for pod in pods]


def sky_command(node: int, tmp_path: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Run SkyPilot's script with a command in place of ours that tells its words."""
    script = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["run"]
    command = tmp_path / "hardened-ddp"
    command.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    env |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(node)}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    env |= {"SKYPILOT_TASK_ID": "sky-managed-2026-11-26-01-02-03-456789_train_1-0"}
    argv = ["bash", "-c", script.replace("29500", str(port))]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.rstrip("\0").split("\0"), {}


NODES = ["compose", "job", "jobset", "trainjob", "pytorchjob", "skypilot"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NODES)
def test_the_nodes_of_each_file_are_one_run(name: str, tmp_path: Path) -> None:
    words = [*POINTS, "--cpu_only", "--max_steps", "2", "--no_tensorboard"]
    commands = commands_of(name, tmp_path, held_port())
    with ExitStack() as stack:
        nodes = []
        for typed, env in commands:
            argv = ["python", "-m", "hardened_ddp_command", *typed, *words]
            argv += ["--output_dir", tmp_path / "runs"]
            nodes.append(stack.enter_context(start_program(argv, env=env)))
        for node in nodes:
            node.wait(120).ok()
    summary = read_summary(only_run(tmp_path / "runs"))
    assert (summary["status"], summary["world_size"]) == ("finished", 2 * len(commands))


@pytest.mark.slow
def test_skypilots_own_parser_accepts_its_file_and_no_misspelt_one(tmp_path: Path) -> None:
    sky = shutil.which("sky")
    if sky is None:
        pytest.skip("there is no sky: pip install skypilot, in an environment of its own")
    text = (DEPLOY / "skypilot.yaml").read_text()
    (misspelt := tmp_path / "misspelt.yaml").write_text(text.replace("job_recovery", "job_recover"))
    code = "import sys, sky; sky.Task.from_yaml(sys.argv[1])"
    argv = [Path(sky).with_name("python"), "-c", code]
    env = {"HOME": str(tmp_path), "PYTHONPATH": ""}
    run_command([*argv, DEPLOY / "skypilot.yaml"], env=env, timeout_s=60).ok()
    refused = run_command([*argv, misspelt], env=env, timeout_s=60)
    assert refused.status != 0
    assert "job_recover" in refused.output


@pytest.mark.slow
def test_two_workers_of_ray_are_two_ranks_of_one_run(tmp_path: Path) -> None:
    ray = shutil.which("ray")
    if ray is None:
        pytest.skip("there is no ray: pip install 'ray[train]' beside torch, in another venv")
    argv = [Path(ray).with_name("python"), DEPLOY / "ray_train.py", "--workers", "2", "--"]
    argv += [*POINTS, "--cpu_only", "--max_steps", "4", "--batch_size", "10", "--no_tensorboard"]
    argv += ["--run_name", "r", "--output_dir", tmp_path / "runs"]
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    run_command(argv, env=env, timeout_s=120).ok()
    summary = read_summary(tmp_path / "runs" / "r")
    assert (summary["status"], summary["step"], summary["world_size"]) == ("finished", 4, 2)
