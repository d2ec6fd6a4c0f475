"""Parameters of a model over an `ExpertPool`, without a checkpoint."""

from dataclasses import replace

from dsv4.engine.offload.pool import ExpertPool, LayerExperts, with_experts
from dsv4.formats.trees import map_tensors, tensors_of


def offload(params, placement, backend, *, top_k, device, num_ranks=1):
    """Main layers' experts of `params` (stacks anywhere, e.g. in host memory) into a pool; everything else as it is.

    The stacks of `params` are copied layer by layer and may be dropped afterwards. Draft blocks stay resident.
    """
    num_experts = len(tensors_of(params.layers[0].ffn.experts.matrices)[0])
    pool = ExpertPool(placement, num_experts, top_k, backend, device=device, num_ranks=num_ranks)
    layers = []
    for block in params.layers:
        stacks = block.ffn.experts.matrices
        layer = LayerExperts(pool, len(pool.layers), map_tensors(stacks, lambda part: part[0], ()))
        pool.adopt(layer)
        for expert_idx in range(num_experts):
            layer.put(expert_idx, [part[expert_idx] for part in tensors_of(stacks)])
        layers.append(with_experts(block, layer))
    return replace(params, layers=layers), pool
