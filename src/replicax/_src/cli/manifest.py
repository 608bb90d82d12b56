"""``replicax manifest jobset --image ... train.py``: print manifests for Kubernetes.

The pods get the environment variables that `MultiWorkerMirroredStrategy()` needs. These derive from
names that Kubernetes assigns, so the pods need no permission to query its API.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from replicax._src.cluster.checks import ClusterError

_PORT = 7000
_PREEMPTED = 143  # the exit code of a worker that saved and stopped after SIGTERM
_INDEX = "batch.kubernetes.io/job-completion-index"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 40  # Kubernetes appends indices and random characters, with a limit of 63
# Strings that need no quotes in YAML, except for the words that it reads as other types.
_PLAIN = re.compile(r"[A-Za-z/_][-A-Za-z0-9/_.]*")
_NOT_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})

Part = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add("kind", choices=sorted(_KINDS), help="the kind of manifest")
    add("--image", required=True, help="the container image, with replicax and the program")
    add("--name", default="train", help="the run's name, a prefix of the workers' host names")
    add("--workers", type=int, default=2, metavar="N", help="number of pods")
    add("--gpus", type=int, default=0, metavar="G", help="GPUs per pod")
    add("--port", type=int, default=_PORT, metavar="P", help="port of worker 0")
    add("--max-restarts", type=int, default=3, metavar="R", help="not counting preemptions")
    add("--grace", type=int, default=60, metavar="S", help="seconds to save after SIGTERM")
    add("--runtime", default="jax-distributed", help="runtime of a TrainJob")
    add("-m", action="store_true", dest="is_module", help="the program is a module")
    add("program", help="path of the training program in the image")
    add("arguments", nargs=argparse.REMAINDER, help="the program's arguments")


def run(options: argparse.Namespace) -> int:
    """Print the manifests.

    Returns:
        0.

    Raises:
        ClusterError: If an argument is invalid.
    """
    _check(options)
    documents = _KINDS[options.kind](options)
    sys.stdout.write("---\n".join("".join(f"{line}\n" for line in _yaml(d)) for d in documents))
    return 0


def _check(options: argparse.Namespace) -> None:
    if not _NAME.fullmatch(options.name) or len(options.name) > _LONGEST_NAME:
        raise ClusterError(
            f"--name is {options.name!r}; host names are made of it, so it must be at most"
            f" {_LONGEST_NAME} small letters, digits and hyphens, with a letter first."
        )
    for name, least in {"workers": 1, "gpus": 0, "port": 1, "max_restarts": 0, "grace": 1}.items():
        if (value := getattr(options, name)) < least:
            flag = name.replace("_", "-")
            raise ClusterError(f"--{flag} is {value}; it must be at least {least}.")


def _jobset(options: argparse.Namespace) -> list[Part]:
    # JobSet names pods <set>-<job>-<job index>-<pod index>, in a subdomain with the set's name.
    first = f"{options.name}-node-0-0.{options.name}"
    spec = {**_job_spec(options, first), "podFailurePolicy": _failure_policy("FailJob")}
    job = {"name": "node", "replicas": 1, "template": {"spec": spec}}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": options.name},
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {
                    "maxRestarts": options.max_restarts,
                    "rules": [
                        {
                            "name": "preempted",
                            "action": "RestartJobSetAndIgnoreMaxRestarts",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "replicatedJobs": [job],
            },
        }
    ]


def _job(options: argparse.Namespace) -> list[Part]:
    spec = _job_spec(options, f"{options.name}-0.{options.name}")
    spec["template"]["spec"]["subdomain"] = options.name
    # One lost worker makes all others fail, and each of these failures counts.
    spec["backoffLimit"] = options.max_restarts * options.workers
    spec["podFailurePolicy"] = _failure_policy("Ignore")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": options.name},
        "spec": spec,
    }
    return [_service(options, {"batch.kubernetes.io/job-name": options.name}), job]


def _pods(options: argparse.Namespace) -> list[Part]:
    labels = {"app": options.name}
    first = f"{options.name}-0.{options.name}"
    return [
        _service(options, labels),
        *(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{options.name}-{index}", "labels": labels},
                "spec": {
                    "hostname": f"{options.name}-{index}",
                    "subdomain": options.name,
                    **_pod_spec(options, first, {"value": str(index)}),
                },
            }
            for index in range(options.workers)
        ),
    ]


def _trainjob(options: argparse.Namespace) -> list[Part]:
    trainer = {
        "image": options.image,
        "numNodes": options.workers,
        "command": _command(options),
        "env": [_token(options)],
    }
    if options.gpus:
        trainer["resourcesPerNode"] = _resources(options)
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": options.name},
            "spec": {"runtimeRef": {"name": options.runtime}, "trainer": trainer},
        }
    ]


_KINDS = {"job": _job, "jobset": _jobset, "pod": _pods, "trainjob": _trainjob}


# Components.


def _job_spec(options: argparse.Namespace, first: str) -> Part:
    index = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}}
    return {
        "completionMode": "Indexed",
        "completions": options.workers,
        "parallelism": options.workers,
        "backoffLimit": 0,
        "template": {"spec": _pod_spec(options, first, index)},
    }


def _pod_spec(options: argparse.Namespace, first: str, index: Part) -> Part:
    """Return the pod spec of one worker.

    Args:
        options: The arguments of the command.
        first: The host name of worker 0.
        index: The value, or the source of the value, of this worker's index.
    """
    container: Part = {
        "name": "worker",
        "image": options.image,
        "command": _command(options),
        "env": [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{first}:{options.port}"},
            {"name": "JAX_NUM_PROCESSES", "value": str(options.workers)},
            {"name": "JAX_PROCESS_ID", **index},
            _token(options),
        ],
        "ports": [{"containerPort": options.port, "name": "hub"}],
    }
    if options.gpus:
        container["resources"] = _resources(options)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        "containers": [container],
    }


def _command(options: argparse.Namespace) -> list[str]:
    module = ["-m"] if options.is_module else []
    program = [*module, options.program, *options.arguments, *options.rest]
    return ["python", "-u", *program]


def _token(options: argparse.Namespace) -> Part:
    secret = {"name": f"{options.name}-token", "key": "token", "optional": True}
    return {"name": "REPLICAX_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def _resources(options: argparse.Namespace) -> Part:
    return {"limits": {"nvidia.com/gpu": options.gpus}}


def _failure_policy(action: str) -> Part:
    """Return rules that handle preemptions with ``action`` instead of counting them as failures."""
    return {
        "rules": [
            {
                "action": action,
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": action,
                "onExitCodes": {
                    "containerName": "worker",
                    "operator": "In",
                    "values": [_PREEMPTED],
                },
            },
        ]
    }


def _service(options: argparse.Namespace, selector: dict[str, str]) -> Part:
    """Return the headless service that gives the pods host names, even before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": options.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [{"name": "hub", "port": options.port}],
        },
    }


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a value in YAML: dictionaries and lists as blocks, scalars as JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict) or (isinstance(item, list) and _is_nested(item)):
                yield f"{indent}{_scalar(key)}:"
                yield from _yaml(item, f"{indent}  ")
            else:
                yield f"{indent}{_scalar(key)}: {_scalar(item)}"
    else:
        for item in value:
            first, *rest = _yaml(item, f"{indent}  ")
            yield f"{indent}- {first.strip()}"
            yield from rest


def _is_nested(items: list[Any]) -> bool:
    return any(isinstance(item, dict) for item in items)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return json.dumps(value)
