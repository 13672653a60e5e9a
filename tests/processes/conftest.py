"""One torch thread: tests share the machine's cores among themselves."""

import torch

torch.set_num_threads(1)
