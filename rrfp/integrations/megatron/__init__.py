"""RRFP for users of Megatron-core: its pipelined ``forward_backward_func``, run by readiness.

    import rrfp.integrations.megatron as rm

    rm.enable()     # anywhere before training starts, before or after the trainer imports Megatron

`enable` puts `MegatronSchedule` in the place of Megatron's two pipelined schedules, so that trainers get it from
``get_forward_backward_func()``; `disable` takes it out again. `forward_backward_func` makes one to be passed on. Where
no script can be edited, the environment variable ``RRFP_MEGATRON`` does what `enable` does.

Megatron is imported when it is needed.
"""

from __future__ import annotations

from rrfp.integrations.megatron.install import disable, enable, forward_backward_func

__all__ = ["disable", "enable", "forward_backward_func"]
