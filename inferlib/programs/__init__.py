"""Programs: what they compute, for which static shapes, which of them an engine has, and the count of compilations."""
