"""Options of training on pairs with a common category."""
