"""The command-line options of a job on a cluster: how each is converted, and which values are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tyro
import yaml

from worldsize import cli
from worldsize.cluster.manifests.spec import Placement, PodJobSpec, PodResources, SecretKey, Toleration
from worldsize.cluster.options import JobOptions, to_spec
from worldsize.config.recipe import Parallel, Recipe
from worldsize.errors import UserError

GPU, CPU = Recipe(), Recipe(device="cpu")
PLAIN = JobOptions(image="worldsize:1", volume=("data",), name="r")


def spec_of(*words: str, recipe: Recipe = CPU) -> PodJobSpec:
    return to_spec(recipe, "digits", "pytorchjob", "ml", tyro.cli(JobOptions, args=list(words), default=PLAIN))


def test_every_option_arrives_where_it_belongs():
    words = (
        *("--nodes", "3", "--procs", "4", "--image", "r/w:2", "--volume", "out", "--name", "run", "--gpus", "4"),
        *("--gpu-resource", "amd.com/gpu", "--cpu", "8", "--memory", "64Gi", "--shm", "2Gi", "--disk", "20Gi"),
        *("--resource", "rdma/ib=1", "--env", "OPTIONS=a=b", "--env", "EMPTY=", "--secret", "store/KEY=TOKEN"),
        *("--secret", "wandb/API_KEY", "--pull-secret", "registry", "--node-selector", "gpu=a40"),
        *("--toleration", "a", "--toleration", "b=c", "--toleration", "d=e:NoExecute", "--toleration", "f:NoSchedule"),
        *("--spread", "zone", "--priority", "high", "--queue", "team", "--volcano-queue", "ml", "--runtime", "torch"),
        *("--elastic", "2:5", "--retries", "7", "--deadline", "3600", "--grace", "90"),
    )
    spec = spec_of(*words)
    # Two volumes: the run is written to the first.
    command = "train /run/worldsize/recipe.yaml --out /mnt/data/runs --name run --autoresume --retries 7"
    assert spec == PodJobSpec(
        name="run",
        namespace="ml",
        image="r/w:2",
        recipe=spec.recipe,
        command=tuple(command.split()),
        nodes=3,
        procs=4,
        resources=PodResources(
            gpus=4,
            gpu_resource="amd.com/gpu",
            cpu="8",
            memory="64Gi",
            shm="2Gi",
            disk="20Gi",
            devices=(("rdma/ib", 1),),
        ),
        volumes=("data", "out"),
        env=(("OPTIONS", "a=b"), ("EMPTY", "")),
        secrets=(SecretKey("store", "KEY", "TOKEN"), SecretKey("wandb", "API_KEY", "API_KEY")),
        pull_secrets=("registry",),
        placement=Placement(
            (("gpu", "a40"),),
            (Toleration("a"), Toleration("b", "c"), Toleration("d", "e", "NoExecute"), Toleration("f", "", "NoSchedule")),
            "zone",
            "high",
            "team",
            "ml",
        ),
        retries=7,
        deadline_s=3600,
        grace_s=90,
        elastic=(2, 5),
        runtime="torch",
    )


def test_each_process_gets_a_gpu_unless_none_is_wanted():
    assert spec_of("--procs", "8", recipe=GPU).resources.gpus == 8
    assert spec_of("--procs", "8", "--gpus", "0", recipe=GPU).resources.gpus == 0
    assert spec_of("--procs", "8").resources.gpus == 0


def test_the_data_are_on_the_first_volume_unless_the_recipe_says_where():
    def root(**data):
        recipe = Recipe.model_validate({"data": data})
        return yaml.safe_load(spec_of(recipe=recipe).recipe)["data"]["root"]

    assert root(name="imagenet") == "/mnt/data/data/imagenet"
    assert root(name="imagenet", root="/elsewhere") == "/elsewhere"
    assert root(name="digits") is None


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        *(("data.root", path) for path in ("~/data", "data", "/mnt/other/data", "/mnt", "/home/me/data", "/Users/me/data")),
        *(("data.root", path) for path in ("/", "/Volumes/Disk/data", "/mnt/data/../other/data", "file:/home/me/data")),
        *(("data.val_list", "val.txt"), ("data.labels", "~/labels.csv"), ("loss.teacher", "runs/a")),
        *(("model.weights", path) for path in ("~/w.pt", "w.safetensors", "runs/a", "/mnt/dat/w.pt")),
    ],
)
def test_paths_of_the_users_own_machine_are_refused(setting, path):
    section, _, name = setting.partition(".")
    with pytest.raises(
        UserError, match=f"--{setting.replace('_', '-')} {path}: pods do not have this path; they have /mnt/data"
    ):
        spec_of(recipe=Recipe.model_validate({section: {name: path}}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("data.root", root) for root in ("/mnt/data/x", "/mnt/data", "/datasets/imagenet", "s3://bucket/shards")),
        *(("model.weights", name) for name in ("/mnt/data/w.pt", "torchvision:ResNet50_Weights.DEFAULT", "timm:resnet50")),
    ],
)
def test_paths_of_pods_and_urls_are_accepted(setting, value):
    section, _, name = setting.partition(".")
    spec_of(recipe=Recipe.model_validate({section: {name: value}}))


@pytest.mark.parametrize(
    "option", ["toleration", "pull-secret", "volume", "queue", "priority", "runtime", "name", "elastic", "cpu", "env"]
)
def test_an_empty_value_is_refused(option):
    """Of a shell variable that is not set; an empty toleration would tolerate every taint."""
    with pytest.raises(UserError, match=f"--{option} is empty"):
        spec_of(f"--{option}", "")


def test_the_same_command_is_the_same_run_and_another_is_not():
    def name(recipe=CPU, stem="My recipe!", on="pytorchjob", **job):
        return to_spec(recipe, stem, on, "ml", replace(PLAIN, name=None, **job)).name

    same = {name(), name(Recipe(device="cpu")), name(memory="1Gi", retries=9)}
    assert len(same) == 1 and same.pop().startswith("my-recipe-")
    others = {name(), name(Recipe(device="cpu", epochs=7)), name(on="mpijob"), name(nodes=2), name(procs=2)}
    assert len(others | {name(volume=("other",))}) == 6
    assert name(stem="9").startswith("run-9-") and name(stem="!").startswith("run-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--image", ""), "--image is required"),
        (("--env", "NAME"), "--env 'NAME': expected NAME=VALUE"),
        (("--env", "=x"), "expected NAME=VALUE"),
        (("--node-selector", "gpu"), "--node-selector 'gpu'"),
        (("--resource", "rdma/ib=many"), "the count must be an integer"),
        (("--secret", "KEY"), "expected SECRET/KEY"),
        (("--secret", "/KEY"), "expected SECRET/KEY"),
        (("--secret", "store/"), "expected SECRET/KEY"),
        (("--toleration", "a=b:Never"), "the effect must be NoSchedule"),
        (("--elastic", "2"), "expected MIN:MAX"),
        (("--elastic", "2:many"), "expected MIN:MAX"),
        (("--elastic", "1:99999999999"), "at most 100000"),
        (("--elastic", "\u00b2:3"), "expected MIN:MAX"),
        (("--resource", "rdma/ib=\u00b2"), "the count must be an integer"),
    ],
)
def test_invalid_options_are_rejected(words, message):
    with pytest.raises(UserError, match=message):
        spec_of(*words)


def test_settings_that_the_strategy_does_not_read_are_rejected():
    ignored = Recipe(device="cpu", parallel=Parallel(strategy="adasum", bucket_mb=3))
    with pytest.raises(UserError, match=r"bucket_mb 3\.0 has no effect with strategy adasum"):
        spec_of(recipe=ignored)


def test_rendering_is_a_command_that_needs_no_cluster(capsys, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    words = ("--on", "mpijob", "--namespace", "ml", "--image", "worldsize:1", "--volume", "data", "--name", "r")
    assert cli.main(["render", "digits", *words, "--gpus", "0", "--optimizer.lr", "0.5"]) == 0
    objects = [*yaml.safe_load_all(capsys.readouterr().out)]
    assert [one["kind"] for one in objects] == ["ConfigMap", "NetworkPolicy", "MPIJob"]
    assert {(one["metadata"]["name"], one["metadata"]["namespace"]) for one in objects} == {("r", "ml")}
    assert yaml.safe_load(objects[0]["data"]["recipe.yaml"])["optimizer"]["lr"] == 0.5
    assert cli.main(["render", "digits", *words, "--retries", "-1"]) == 64
    assert "--retries -1 must be at least 0" in capsys.readouterr().err
