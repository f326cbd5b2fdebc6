"""The sum of the gradients over the ranks: one object, with three ways to make it."""
