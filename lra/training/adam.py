"""PyTorch's AdamW without the import of PyTorch's compiler, which takes longer than many steps.

The methods of PyTorch's optimisers import the compiler only to keep it out of them. Here nothing is
compiled but the model, so the plain methods behind those wrappers do the same.
"""

from __future__ import annotations

from inspect import unwrap

import torch


class AdamW(torch.optim.AdamW):
    """The same states and updates."""

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
