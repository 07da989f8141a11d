"""From a memory budget to a plan: an inner frontier for each kind of layer, an outer program over the layers."""
