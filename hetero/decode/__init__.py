"""The decode path of known families: fused steps over the weights of a loaded tree.

A decoder (``decoder``) is an embedding, layers and a head. A family (``families``) turns each decoder layer
of the tree into a ``Layer``, whose token mixer (``attention``, ``delta``) and MoE block (``moe``) are fused
operators; routed experts come in by ``experts.LayerExperts``. A step computes one token of every row and can
be captured as a CUDA graph; a prefill computes many tokens of one sequence, eagerly.
"""
