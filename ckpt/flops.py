"""Placeholder for the lead's local tests; the [ledger] owner replaces this file whole."""
import torch
aten = torch.ops.aten
def op_flops(f, a, k, out):
    n = f.overloadpacket
    if n is aten.mm: return 2*a[0].shape[0]*a[0].shape[1]*a[1].shape[1]
    if n is aten.addmm: return 2*a[1].shape[0]*a[1].shape[1]*a[2].shape[1]
    if n is aten.bmm: return 2*a[0].shape[0]*a[0].shape[1]*a[0].shape[2]*a[1].shape[2]
    if n is aten._scaled_dot_product_flash_attention_for_cpu: return 2*a[0].numel()*a[1].shape[-2]
    return 0
