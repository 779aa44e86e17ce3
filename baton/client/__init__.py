"""Client and AsyncClient: how Python programs call a router."""
