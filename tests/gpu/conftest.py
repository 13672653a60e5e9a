"""One torch thread, as in the other rings."""

import torch

torch.set_num_threads(1)
