"""Fused kernels, one module a device, each tested against its definition in `mmfn.ops`."""
