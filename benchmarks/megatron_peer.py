"""Starts the megatron-core peer with our model: megatron_peer.py SCRIPT FFN_SIZE [flags of the script].

The script fixes an MLP of 4 × hidden, LayerNorm and biases, whose matrices are a third larger.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any


def main() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    script, ffn_size = sys.argv[1], int(sys.argv[2])
    original = TransformerConfig.__init__

    def initialize(self: object, **values: Any) -> None:  # megatron's own fields
        ours = {"ffn_hidden_size": ffn_size, "normalization": "RMSNorm", "add_bias_linear": False}
        original(self, **(values | ours))

    TransformerConfig.__init__ = initialize
    sys.argv = [script, *sys.argv[3:]]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
