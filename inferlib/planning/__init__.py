"""Planning: the costs of a step, its messages over the mesh, and the deployment for a workload, all without
compiling."""
