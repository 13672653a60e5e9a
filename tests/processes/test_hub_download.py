"""A model by its name on the hub, which a server of the test's own is: fetched once a machine, then trained."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.ranks.test_huggingface import make

pytestmark = pytest.mark.processes
NAME, COMMIT = "some/model", "0123456789abcdef0123456789abcdef01234567"


def digest(body: bytes) -> str:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()


@contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
    """The hub's protocol for one model: what it holds, and each file. Its address, and how often a file was fetched."""
    fetched: Counter[str] = Counter()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{NAME}/tree/"):
                files = [
                    {
                        "type": "file",
                        "path": file.name,
                        "size": file.stat().st_size,
                        "oid": digest(file.read_bytes()),
                    }
                    for file in folder.iterdir()
                ]
                self.answer(json.dumps(files).encode())
                return
            if path.startswith(f"/api/models/{NAME}"):
                siblings = [{"rfilename": file.name} for file in folder.iterdir()]
                self.answer(json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
                return
            file = folder / path.rpartition("/")[2]
            if f"/{NAME}/resolve/" not in path or not file.is_file():
                self.send_error(404)
                return
            if self.command == "GET":
                fetched[file.name] += 1
            self.answer(file.read_bytes())

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("ETag", f'"{digest(body)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    finally:
        server.shutdown()
        server.server_close()


def test_two_ranks_fetch_a_model_once_and_train_it(tmp_path: Path) -> None:
    made = tmp_path / "made"
    make("llama", made, vocab_size=260)
    (made / "pytorch_model.bin").write_bytes(b"pickled")
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["triaxis.launch.train", "--model_name_or_path", NAME, "--data", "stdlib", "--seq", "16"]
    command += ["--steps", "1", "--dp", "2", "--per-device-train-batch-size", "1", "--global-batch", "2"]
    with hub_of(made) as (address, fetched):
        alone = {
            "HF_ENDPOINT": address,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "OMP_NUM_THREADS": "1",
        }
        for run in ("first", "second"):
            ran = subprocess.run(
                [*command, "--output-dir", str(tmp_path / run)],
                env=os.environ | alone | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"},
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
            assert ran.returncode == 0, ran.stderr[:1500]
    wanted = {file.name for file in made.iterdir()} - {"pytorch_model.bin"}
    assert {"config.json", "model.safetensors"} <= wanted
    assert fetched == dict.fromkeys(wanted, 1), "each file once, by one rank, and nothing that is pickled"
    one, other = (
        json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0])
        for run in ("first", "second")
    )
    assert one["loss"] == other["loss"]
