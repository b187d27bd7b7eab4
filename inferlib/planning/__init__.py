"""Planning: what a step costs and sends over the mesh, and which deployment suits a workload, without compiling."""
