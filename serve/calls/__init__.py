"""How a service calls its parts: typed requests, the clients that send them, and the control of all replicas."""
