"""The pass that lets what is left to TVM keep NaN in element-wise maxima and minima."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.keep_nans import keep_nans


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.KeepNans")
class KeepNans:
    """Let ``relu``, ``clip``, ``maximum`` and ``minimum`` be NaN where torch's are.

    A pass over modules behind ``LegalizeOps`` and `FuseCascades`, which reads cascades with TVM's
    own maxima. It changes functions of TensorIR, see `crossfuse.lower.keep_nans`; kernels that
    we schedule are changed when they are lowered.

    Examples
    --------
    >>> import torch
    >>> import tvm
    >>> from crossfuse.relax import KeepNans, import_torch
    >>> mod = import_torch(torch.nn.ReLU().eval(), (torch.zeros(64, 16),)).mod
    >>> mod = tvm.ir.transform.Sequential([tvm.relax.transform.LegalizeOps(), KeepNans()])(mod)
    >>> "T.crossfuse_maximum" in str(mod)
    True
    """

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `KeepNans`.

        Parameters
        ----------
        mod : tvm.IRModule
            The module; it stays as it is.

        Returns
        -------
        tvm.IRModule
            With operators of `crossfuse.lower.keep_nans`.
        """
        made = mod.clone()
        for name, func in mod.functions_items():
            if isinstance(func, ir.PrimFunc):
                made.update_func(name, keep_nans(func))
        return made
