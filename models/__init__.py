"""Pure functions and their parameter trees, one module a model."""
