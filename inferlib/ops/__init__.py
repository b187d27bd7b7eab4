"""One file per operation: the contract, the readable XLA implementation, and the choice of backend.

Steps of a layer that one kernel fuses (`mla_queries`, `project_and_attend`) have no XLA form here: without the kernel,
the layer runs them as separate operations, with options that no kernel has.

Letters: T tokens, B decode rows, P prefill chunks of C tokens, N cache pages of S positions, K key/value
heads, G query heads per KV head, h head size.
"""
