"""Training of a quantised model's weights, so that they lose less: from the model that they were rounded from, or from
texts alone."""
