"""Where tensors live: meshes, tables of rules, layouts and collectives by axis name."""
