"""Reports of a TrainJob's progress, received by a real HTTPS server."""

from __future__ import annotations

import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paths import SMALL_NETWORK
from processes import worldsize
from worldsize.config.recipe import Track
from worldsize.runs.run_folder import RunFolder
from worldsize.track import base, kubeflow

SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "96", "--data.classes", "10", "--precision", "fp32"),
    *("--model.name", SMALL_NETWORK, "--epochs", "1", "--global-batch", "48", "--micro-batch", "12"),
    *("--schedule.warmup-epochs", "0", "--track.every-seconds", "0"),
)


class Server:
    """Kubeflow's endpoint: records (path, authorization, content)."""

    def __init__(self, folder: Path) -> None:
        key, self.certificate = folder / "key.pem", folder / "ca.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
             "-keyout", key, "-out", self.certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
            check=True, timeout=60, capture_output=True,
        )  # fmt: skip
        received = self.received = []
        self.elsewhere = ""  # where to send the client instead
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.record(content)

            def do_GET(self) -> None:  # what becomes of a POST that is sent elsewhere
                server.elsewhere = ""
                self.record(None)

            def record(self, content: object) -> None:
                received.append((self.path, self.headers["Authorization"], content))
                self.send_response(302 if server.elsewhere else 200)
                if server.elsewhere:
                    self.send_header("Location", server.elsewhere)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.http.server_address[1]}/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/a/status"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path)
    yield one
    one.http.shutdown()


def reporting(server: Server, folder: Path, prefix: str) -> dict[str, str]:
    """The variables that Kubeflow sets in a pod."""
    (folder / "token").write_text("secret-token\n")
    place = {"URL": server.url, "TOKEN": str(folder / "token"), "CA_CERT": str(server.certificate)}
    return {f"{prefix}_{name}": value for name, value in place.items()}


@pytest.mark.parametrize("prefix", ["KUBEFLOW_TRAINER_STATUS", "KUBEFLOW_TRAINER_SERVER"])
@pytest.mark.parametrize("steps", [(), ("--max-steps", "0")])
def test_a_run_reports_its_progress_where_the_trainer_asks_for_it(server, tmp_path, prefix, steps):
    done = worldsize(
        "train", "digits", *SETTINGS, *steps, "--name", "a", cwd=tmp_path, **reporting(server, tmp_path, prefix)
    )
    assert done.returncode == 0, done.stderr
    assert "kubeflow" not in done.stderr
    path, authorization, content = server.received[-1]
    assert path.endswith("/trainjobs/a/status") and authorization == "Bearer secret-token"
    status = content["trainerStatus"]
    assert status["progressPercentage"] == 100 and status["estimatedRemainingSeconds"] == 0
    metrics = {one["name"]: float(one["value"]) for one in status["metrics"]}
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert metrics["val_top1"] == pytest.approx(result["top1"], rel=1e-5)
    assert "secret-token" not in done.stdout + done.stderr


@pytest.mark.parametrize(("known", "left"), [(True, {"estimatedRemainingSeconds": 20}), (False, {})])
def test_an_evaluation_keeps_the_speed_of_the_last_steps(server, tmp_path, monkeypatch, known, left):
    """The time since the last evaluation says nothing of the steps before it; a resumed run may begin with one."""
    for name, value in reporting(server, tmp_path, "KUBEFLOW_TRAINER_STATUS").items():
        monkeypatch.setenv(name, value)
    tracker = kubeflow.Tracker(Track(), RunFolder(tmp_path), 0)
    tracker.begin(SimpleNamespace(total_steps=100))
    if known:
        tracker.steps([base.Step(60, 3.0, 1.0, 0.5, 0.1, 1.0, 100.0, [], 500.0, 0.0, 0.0, 0.0, 0, 0)])
    tracker.epoch(base.Epoch(3, 60, 1.0, 0.5, 1.0, 0.5, 1.0, 360, 0, 100.0, 10.0, 3.0))
    tracker.end(None)
    status = server.received[-1][2]["trainerStatus"]
    assert status["progressPercentage"] == 60
    assert {name: value for name, value in status.items() if name == "estimatedRemainingSeconds"} == left


@pytest.mark.parametrize("several", [{}, {"val_map": 0.75}])
def test_the_map_is_reported_where_images_have_several_labels(server, tmp_path, monkeypatch, several):
    for name, value in reporting(server, tmp_path, "KUBEFLOW_TRAINER_STATUS").items():
        monkeypatch.setenv(name, value)
    tracker = kubeflow.Tracker(Track(), RunFolder(tmp_path), 0)
    tracker.begin(SimpleNamespace(total_steps=100))
    tracker.epoch(base.Epoch(3, 60, 1.0, 0.5, 1.0, 0.5, 1.0, 360, 0, 100.0, 10.0, 3.0, **several))
    tracker.end(None)
    metrics = {one["name"]: float(one["value"]) for one in server.received[-1][2]["trainerStatus"]["metrics"]}
    assert metrics == {"val_loss": 1.0, "val_top1": 0.5, **several}


def test_the_token_does_not_follow_a_redirect(server, tmp_path, monkeypatch):
    for name, value in reporting(server, tmp_path, "KUBEFLOW_TRAINER_STATUS").items():
        monkeypatch.setenv(name, value)
    server.elsewhere = server.url.replace("/trainjobs/", "/elsewhere/")
    tracker = kubeflow.Tracker(Track(), RunFolder(tmp_path), 0)
    tracker.begin(SimpleNamespace(total_steps=100))
    tracker.epoch(base.Epoch(3, 60, 1.0, 0.5, 1.0, 0.5, 1.0, 360, 0, 100.0, 10.0, 3.0))
    tracker.end(None)
    (_, first, _), (path, second, _) = server.received
    assert first == "Bearer secret-token" and "/elsewhere/" in path
    assert second is None


def test_a_server_that_does_not_answer_does_not_disturb_the_run(server, tmp_path):
    server.http.shutdown()
    env = reporting(server, tmp_path, "KUBEFLOW_TRAINER_STATUS")
    done = worldsize("train", "digits", *SETTINGS, "--name", "a", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
