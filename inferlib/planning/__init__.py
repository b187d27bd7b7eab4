"""Planning: what a step costs and what moves between devices, without a device and without compiling."""
