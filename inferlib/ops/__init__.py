"""One file per operation: the contract, the readable XLA implementation, and the choice of backend.

Letters: T tokens, B decode rows, P prefill chunks of C tokens, N cache pages of S positions, K key/value
heads, G query heads per KV head, h head size.
"""
