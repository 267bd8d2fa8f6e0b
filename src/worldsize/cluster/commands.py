"""The cluster commands: one thin function per command. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from worldsize.cluster import options
from worldsize.cluster.manifests import load_target
from worldsize.cluster.manifests.pod import to_yaml
from worldsize.cluster.manifests.spec import PodJobSpec
from worldsize.cluster.objects import Object
from worldsize.cluster.options import Where
from worldsize.config import command_line
from worldsize.distributed.stop_signals import nothing_was
from worldsize.errors import PREFLIGHT_FAILED, SUCCESS
from worldsize.jobs.commands import detached, follow, recipe_argument
from worldsize.jobs.terminal import note

if TYPE_CHECKING:
    from worldsize.cluster.api.client import Cluster


def train_on(argv: list[str]) -> int:
    """``worldsize train RECIPE --on KIND``."""
    with nothing_was("submitted"):
        stem, recipe, rest = recipe_argument(argv, "train")
        asked = command_line.parse(options.Submit, rest, options.Submit(settings=recipe), f"train {stem} --on KIND")
        cluster = _cluster(asked.where)
        spec, manifests = _rendered(asked, stem, cluster.namespace)
        if asked.preflight or asked.check_only:
            from worldsize.cluster.preflight import runner

            if not runner.run(cluster, asked.on, spec, manifests, quiet=not asked.check_only):
                return PREFLIGHT_FAILED
        if asked.check_only:
            return SUCCESS
        from worldsize.cluster.jobs import manage
        from worldsize.cluster.jobs.scheduler import Jobs

        interrupted = manage.submit(cluster, spec, manifests)
    note(f"Created {load_target(asked.on).kind} {spec.name} in namespace {cluster.namespace}")
    if asked.detach:
        note(f"Follow it with: {cluster.command('logs', spec.name)}")
        return SUCCESS
    scheduler = Jobs.of(cluster)
    try:
        if interrupted:
            raise KeyboardInterrupt
        code = follow(scheduler, scheduler.find(spec.name), asked.timeout, None)
    except KeyboardInterrupt:
        return detached(scheduler, spec.name, "stop" if spec.placement.queue is None else "delete")
    if code == SUCCESS:
        download = ("cluster", "files", "get", f"{spec.volumes[0]}:/runs/{spec.name}", "--image", spec.image)
        note(f"Download the run with: {cluster.command(*download)}")
    return code


def render(argv: list[str]) -> int:
    """``worldsize render RECIPE --on KIND``."""
    stem, recipe, rest = recipe_argument(argv, "render")
    asked = command_line.parse(options.Render, rest, options.Render(settings=recipe), f"render {stem} --on KIND")
    print(to_yaml(_rendered(asked, stem, asked.namespace)[1]), end="")
    return SUCCESS


def _rendered(asked: options.Render | options.Submit, stem: str, namespace: str) -> tuple[PodJobSpec, list[Object]]:
    """The job and its manifests."""
    spec = options.to_spec(asked.settings, stem, asked.on, namespace, asked.job)
    manifests = load_target(asked.on).render(spec)
    if (warning := options.elastic_warning(asked.settings, asked.job)) is not None:
        note(warning)
    return spec, manifests


def connected(title: str, options: type[Any], function: Callable[[Any, Cluster], int], argv: list[str]) -> int:
    """Run a function of the options and the cluster that they name."""
    asked = command_line.parse(options, argv, None, title)
    return function(asked, _cluster(asked.where))


def browse(argv: list[str]) -> int:
    """``worldsize cluster files browse``."""
    from worldsize.cluster.storage import browse

    return browse.show(command_line.parse(browse.FilesBrowse, argv, None, "cluster files browse"))


def image_build(argv: list[str]) -> int:
    """``worldsize image build``."""
    from worldsize.cluster.image import build

    end = argv.index("--") if "--" in argv else len(argv)
    asked = command_line.parse(build.ImageBuild, argv[:end], build.ImageBuild(), "image build")
    return build.build(asked, argv[end + 1 :])


def _cluster(where: Where) -> Cluster:
    from worldsize.cluster.api.client import Cluster

    return Cluster(where.context, where.namespace)
