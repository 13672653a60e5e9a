"""One torch thread: tests share the machine's cores among themselves."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw nothing: it takes longer than they do."""
    monkeypatch.setattr("triaxis.engine.run.trainer.plot_run", lambda directory: directory)
