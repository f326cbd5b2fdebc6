"""The network, its DDP replica, its precision and its optimizer."""
