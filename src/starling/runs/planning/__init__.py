"""What a strategy will give on some machines: costs, measured or from data sheets, and simulations with them."""
