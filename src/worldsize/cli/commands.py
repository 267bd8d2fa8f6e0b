"""Every command, once: the command line is read by this table, and its help and its completion are made from it.

A new command is a function ``(arguments) -> exit code`` and a line here.
"""

from __future__ import annotations

from worldsize.cli.command import Command, Section

SECTIONS = (
    Section(
        "Train",
        (
            Command(
                "init",
                "FOLDER",
                "look at your images and write a recipe for them",
                "cli.train:init",
                "initialize.command:Init",
            ),
            Command(
                "train",
                "RECIPE [--procs N] [--SETTING VALUE ...]",
                "train; RECIPE is a name or a YAML file",
                "cli.train:train",
                "config.command_line:Train",
                more=(
                    ("--resume RUN [--procs N]", "resume a run at the exact step where it stopped"),
                    ("RECIPE --on slurm --nodes 2 --procs 4 ...", "submit a Slurm job and follow it (docs/slurm.md)"),
                    ("RECIPE --on ssh --hosts h1:4,h2:4", "run on hosts that you reach by ssh (docs/hosts.md)"),
                    ("RECIPE --on pytorchjob|mpijob|trainjob ...", "run on Kubernetes with Kubeflow (docs/kubernetes.md)"),
                ),
            ),
            Command("tune", "RECIPE", "find a learning rate in a few short runs", "tune.command:run", "tune.options:Tune"),
            Command(
                "recipes", "[NAME [--against OTHER]]", "list the recipes; print one; compare two", "config.listing:main"
            ),
        ),
    ),
    Section(
        "Use a trained network",
        (
            Command(
                "eval",
                "RUN|CHECKPOINT [--SETTING VALUE ...]",
                "evaluate it",
                "cli.evaluate:run",
                "config.command_line:Evaluate",
            ),
            Command(
                "predict",
                "RUN|CHECKPOINT|EXPORT [PATHS ...]",
                "classify images: files, folders, shards, standard input",
                "inference.predict.command:run",
                "inference.predict.command:Predict",
            ),
            Command(
                "export",
                "RUN --to FORMAT --out DIR",
                "write it for timm, ONNX or torch.export; check its answers",
                "inference.export.command:run",
                "inference.export.command:Export",
            ),
            Command(
                "labels",
                "RUN [--sheet PAGE]",
                "find training images whose labels are probably wrong",
                "inference.labels.command:run",
                "inference.labels.command:Labels",
            ),
        ),
    ),
    Section(
        "Look at runs",
        (
            Command("runs", "[FOLDER]", "list runs", "report.commands:runs", "report.commands:Runs"),
            Command(
                "compare", "RUN OTHER", "show where two runs differ", "report.commands:compare", "report.commands:Compare"
            ),
            Command(
                "report",
                "RUN|BENCH|PLAN ... [--out PAGE]",
                "one page with charts, without network",
                "report.commands:report",
                "report.commands:Report",
            ),
            Command(
                "explain",
                "RUN",
                "where a run's time went, and what would make it faster",
                "bench.explain:run",
                "bench.explain:Explain",
            ),
        ),
    ),
    Section(
        "Reproduce",
        (
            Command(
                "prove",
                "RECIPE [--procs 1,2,4]",
                "show that the number of processes does not change a run",
                "reproduce.commands:prove",
                "reproduce.options:Prove",
            ),
            Command(
                "replay",
                "RUN --step N",
                "compute a past step again; show what the model saw",
                "reproduce.commands:replay",
                "reproduce.options:Replay",
            ),
            Command(
                "audit",
                "RUN",
                "verify a run and compute parts of it again",
                "reproduce.commands:audit",
                "reproduce.options:Audit",
            ),
        ),
    ),
    Section(
        "Scale",
        (
            Command(
                "plan",
                "RECIPE --devices 8,64,512 --weak",
                "predict speed, time, price and the bottleneck at each size",
                "plan.command:run",
                "plan.arguments:Plan",
            ),
            Command(
                "bench scaling",
                "RECIPE --procs 1,2,4",
                "measure how a recipe scales, and where the time goes",
                "cli.bench:scaling",
                "bench.scaling.arguments:BenchScaling",
            ),
            Command(
                "bench allreduce",
                "[--procs N]",
                "measure latency and bandwidth between processes",
                "bench.allreduce:main",
                "bench.allreduce:BenchAllreduce",
            ),
            Command(
                "bench step",
                "",
                "measure a training step against bare loops",
                "cli.bench:step",
                "bench.options:BenchStep",
            ),
            Command(
                "bench strategies",
                "[--procs N]",
                "compare the speed of the strategies on this machine",
                "cli.bench:strategies",
                "bench.options:BenchStrategies",
            ),
            Command(
                "bench loader",
                "--root FOLDER [--against NAMES]",
                "measure the data loader and find its bottleneck",
                "cli.bench:loader",
                "bench.options:BenchLoader",
            ),
            Command("strategies", "", "list the parallel strategies and what works here", "cli.machine:strategies"),
            Command("env", "", "show this machine and what a run would use", "cli.machine:env"),
        ),
    ),
    Section(
        "Data",
        (
            Command(
                "data fetch",
                "DATASET --to FOLDER",
                "download, verify and unpack a dataset",
                "cli.data:fetch",
                "data.fetch.command:Fetch",
            ),
            Command(
                "data verify",
                "FOLDER|SHARDS",
                "decode every image; list broken and duplicate ones",
                "cli.data:verify",
                "cli.data:Verify",
            ),
            Command("data info", "FOLDER|SHARDS", "classes, sizes, a contact sheet", "cli.data:info", "cli.data:Info"),
            Command(
                "data pack",
                "FOLDER --out SHARDS",
                "pack a dataset into a few large files",
                "cli.data:pack",
                "cli.data:Pack",
            ),
        ),
    ),
    Section(
        "Kubernetes with Kubeflow",
        (
            Command(
                "cluster check",
                "",
                "check the cluster, and what you may do on it",
                "cluster.preflight.runner:check",
                "cluster.preflight.runner:ClusterCheck",
                on_cluster=True,
            ),
            Command(
                "cluster volume create",
                "NAME --size SIZE",
                "create a volume for data and runs",
                "cluster.storage.volumes:create",
                "cluster.storage.volumes:VolumeCreate",
                on_cluster=True,
            ),
            Command(
                "cluster volume list",
                "",
                "list volumes",
                "cluster.storage.volumes:show",
                "cluster.storage.volumes:VolumeList",
                on_cluster=True,
            ),
            Command(
                "cluster volume delete",
                "NAME",
                "delete a volume and its files",
                "cluster.storage.volumes:delete",
                "cluster.storage.volumes:VolumeDelete",
                on_cluster=True,
            ),
            Command(
                "cluster secret create",
                "NAME ...",
                "store a token, such as Kaggle's",
                "cluster.storage.secrets:create",
                "cluster.storage.secrets:SecretCreate",
                on_cluster=True,
            ),
            Command(
                "cluster secret list",
                "",
                "list secrets; their values are never shown",
                "cluster.storage.secrets:show",
                "cluster.storage.secrets:SecretList",
                on_cluster=True,
            ),
            Command(
                "cluster secret delete",
                "NAME",
                "delete a secret",
                "cluster.storage.secrets:delete",
                "cluster.storage.secrets:SecretDelete",
                on_cluster=True,
            ),
            Command(
                "cluster data fetch",
                "DATASET --volume NAME --image IMAGE",
                "download a dataset to a volume",
                "cluster.jobs.fetch:fetch",
                "cluster.jobs.fetch:Fetch",
                on_cluster=True,
            ),
            Command(
                "cluster files ls",
                "VOLUME:/PATH",
                "list files on a volume",
                "cluster.storage.files:show",
                "cluster.storage.files:FilesList",
                on_cluster=True,
            ),
            Command(
                "cluster files get",
                "VOLUME:/PATH [FOLDER]",
                "download files from a volume",
                "cluster.storage.files:get",
                "cluster.storage.files:FilesGet",
                on_cluster=True,
            ),
            Command(
                "cluster files put",
                "PATH VOLUME:/PATH",
                "upload files to a volume",
                "cluster.storage.files:put",
                "cluster.storage.files:FilesPut",
                on_cluster=True,
            ),
            Command(
                "cluster files browse",
                "VOLUME",
                "print the manifests of a web page that shows a volume",
                "cluster.commands:browse",
                "cluster.storage.browse:FilesBrowse",
            ),
            Command(
                "image build",
                "[--push REPOSITORY]",
                "build the container image for pods",
                "cluster.commands:image_build",
                "cluster.image.build:ImageBuild",
            ),
        ),
        brief=(
            ("cluster check|volume|secret|data|files ...", "check the cluster; manage volumes, secrets, data, files"),
            ("image build [--push REPOSITORY]", "build the container image for pods"),
        ),
    ),
    Section(
        "Jobs on a cluster, Slurm or hosts",
        (
            Command("render", "RECIPE --on TARGET", "print the job; --on local: a shell script", "jobs.commands:render"),
            Command("jobs", "", "list jobs", "jobs.commands:jobs", "jobs.commands:Jobs"),
            Command("status", "NAME", "show a job and its processes", "jobs.commands:status", "jobs.commands:Status"),
            Command("logs", "NAME", "follow a job's output", "jobs.commands:logs", "jobs.commands:Logs"),
            Command("wait", "NAME", "wait for a job's end", "jobs.commands:wait", "jobs.commands:Wait"),
            Command("stop", "NAME", "save and stop a job", "jobs.commands:stop", "jobs.commands:Stop"),
            Command("delete", "NAME", "delete a job; its runs remain", "jobs.commands:delete", "jobs.commands:Delete"),
            Command(
                "agent",
                "--id RUN -- train RECIPE ...",
                "run one node's processes (docs/hosts.md)",
                "cli.train:agent",
                "config.command_line:Agent",
            ),
        ),
    ),
    Section(
        "Shell",
        (Command("completion", "bash|zsh", "print a script that completes commands and flags", "cli.completion:run"),),
    ),
)
COMMANDS = tuple(command for section in SECTIONS for command in section.commands)
