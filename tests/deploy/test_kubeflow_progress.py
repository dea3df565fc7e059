"""Tests the example that shows a training's progress in Kubeflow Trainer, over real HTTPS."""

from __future__ import annotations

import importlib.util
import json
import queue
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.running import ROOT

Post = tuple[str, str | None, Any]
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ns/trainjobs/group-0/status"


@pytest.fixture(scope="module")
def example() -> Any:
    path = ROOT / "examples" / "kubeflow_progress.py"
    spec = importlib.util.spec_from_file_location("kubeflow_progress", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.Queue[Post]]:
    """What a server has received that is like the one of Kubeflow Trainer."""
    received: queue.Queue[Post] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.put((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("a token\n")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    url = f"https://127.0.0.1:{server.server_port}{PATH}"
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_posts_the_newest_progress(example: Any, controller: queue.Queue[Post]) -> None:
    progress = example.KubeflowProgress(num_steps=400)
    progress.report(10, loss=2.5)
    progress.report(101, loss=1.25)
    progress.close()
    path, authorization, body = controller.get_nowait()
    assert (path, authorization) == (PATH, "Bearer a token")
    status = body["trainerStatus"]
    assert status["progressPercentage"] == 25
    assert status["metrics"] == [{"name": "loss", "value": "1.25"}]
    assert status["estimatedRemainingSeconds"] >= 0
    assert status["lastUpdatedTime"].endswith("Z")
    assert controller.empty()


def test_a_controller_that_is_away_costs_nothing(
    example: Any,
    controller: queue.Queue[Post],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1/status")
    progress = example.KubeflowProgress(num_steps=400)
    progress.report(10)
    progress.close()
    assert "progress was not posted" in capsys.readouterr().out
    assert controller.empty()


def test_it_does_nothing_elsewhere(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    before = threading.active_count()
    progress = example.KubeflowProgress(num_steps=400)
    progress.report(10)
    assert threading.active_count() == before
    progress.close()
