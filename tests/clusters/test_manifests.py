"""The printed manifests validate: by Kubernetes' own schemas, JobSet's and Kubeflow's models."""

import importlib.util

import pytest

from tests.cli.test_manifest import KINDS, printed  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.skipif(
        importlib.util.find_spec("kubernetes_validate") is None,
        reason="make test-clusters installs kubernetes-validate",
    ),
]


def without_quantities(value):
    """Leave out resources: the models take their quantities as objects of their own only."""
    if isinstance(value, dict):
        left_out = ("resources", "resourcesPerNode")
        return {k: without_quantities(v) for k, v in value.items() if k not in left_out}
    return list(map(without_quantities, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [(), ("--gpus", "8", "--workers", "3", "--name", "mnist")])
def test_manifests_validate(printed, kind, more):  # noqa: F811
    import kubernetes_validate  # noqa: PLC0415 - see above
    from kubeflow_trainer_api import models  # noqa: PLC0415

    for document in printed(kind, *more, "/app/train.py", "--epochs", "2"):
        match document["kind"]:
            case "JobSet":
                models.JobsetV1alpha2JobSet.model_validate(without_quantities(document))
                spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
                document = {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": document["metadata"],
                    "spec": spec,
                }
            case "TrainJob":
                plain = without_quantities(document)
                read = models.TrainerV1alpha1TrainJob.model_validate(plain)
                assert read.to_dict() == plain  # nothing that the model does not know
                continue
        kubernetes_validate.validate(document, "1.37", strict=True)
