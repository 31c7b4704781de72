"""What a started server must show before it is committed, one module for each part."""
