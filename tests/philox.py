"""The random numbers that TensorFlow's stateless operations are made of, in plain Python."""


def philox_4x32_10(counter, key):
    """Salmon et al. 2011, section 3.3: four random words from four words and a key of two."""
    words, key = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(high >> 32) ^ words[1] ^ key[0], high % 2 ** 32,
                 (low >> 32) ^ words[3] ^ key[1], low % 2 ** 32]
        key = [(key[0] + 0x9E3779B9) % 2 ** 32, (key[1] + 0xBB67AE85) % 2 ** 32]
    return words
