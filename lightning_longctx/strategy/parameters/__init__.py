"""How parameters are spread over ranks: cut by tensor ranks, then sharded or replicated."""
