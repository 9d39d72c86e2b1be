"""What the further options of ``make train`` need: a module for each group of them."""
