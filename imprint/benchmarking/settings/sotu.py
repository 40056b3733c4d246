"""Loads State of the Union addresses: 16 presidents as sources, passages to learn from, and held-out ones to ask about.

A president's addresses are cut into passages of whole sentences, about a hundred words each, up to 20,000 words spread
over all of the addresses. Of every president some passages are held out, at even distances. The texts are public
domain; each address is one file, named by its year and president.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imprint.benchmarking.settings.download import fetch
from imprint.errors import DataError

_URL = "https://raw.githubusercontent.com/stdlib-js/datasets-sotu/v0.2.3/data/"
PRESIDENTS = {
    "jefferson": ("thomas_jefferson_dr", (1801, 1808)),
    "monroe": ("james_monroe_dr", (1817, 1824)),
    "jackson": ("andrew_jackson_d", (1829, 1836)),
    "polk": ("james_polk_d", (1845, 1848)),
    "pierce": ("franklin_pierce_d", (1853, 1856)),
    "lincoln": ("abraham_lincoln_r", (1861, 1864)),
    "grant": ("ulysses_s_grant_r", (1869, 1876)),
    "mckinley": ("william_mc_kinley_r", (1897, 1900)),
    "theodore roosevelt": ("theodore_roosevelt_r", (1901, 1908)),
    "wilson": ("woodrow_wilson_d", (1913, 1920)),
    "coolidge": ("calvin_coolidge_r", (1923, 1928)),
    "franklin roosevelt": ("franklin_d_roosevelt_d", (1934, 1945)),
    "eisenhower": ("dwight_d_eisenhower_r", (1953, 1961)),
    "lyndon johnson": ("lyndon_b_johnson_d", (1964, 1969)),
    "reagan": ("ronald_reagan_r", (1982, 1988)),
    "obama": ("barack_obama_d", (2009, 2016)),
}
"""The name of each source: the president and party in the names of the files, and the first and last year."""
_FILES = {  # SHA-256 of each address
    "1801_thomas_jefferson_dr.txt": "6baf9fcb486c7816eaf7d5978e5ac588e469abeafc7cb0bcc0cf1e97d960e089",
    "1802_thomas_jefferson_dr.txt": "34bee74f60e90c8cb1b163393db5f342e379b4cb8db21160961bcf1d43f3ad46",
    "1803_thomas_jefferson_dr.txt": "e67be9236646d0325b1974824af3be992cfecb03ff9d4f423901cf35168c121b",
    "1804_thomas_jefferson_dr.txt": "b28ea236b6dad8c45048b59791893704f5c84bc0adfab87905fb2fc81cfe37a2",
    "1805_thomas_jefferson_dr.txt": "b345d00cac5bb43ecb222a20ee04ee6dd03e2fb3b9b210280ee86f513bed37d5",
    "1806_thomas_jefferson_dr.txt": "e265f2374dcf24573b21f930d1d9a6ad5ad3b78a99b1d3d17ea1bf9a2b9f40e5",
    "1807_thomas_jefferson_dr.txt": "6db98dd772e063cec65a5de401fded1958a0b217169cded19f879930d9df1c65",
    "1808_thomas_jefferson_dr.txt": "20742f25badbb2129622b3f59e226ccaece21e45259549512a8f4838657c122b",
    "1817_james_monroe_dr.txt": "d2d79591761892112d20e2c19e484435afb3f3834fd2c2f631f61c6b87b21f22",
    "1818_james_monroe_dr.txt": "7c39496bb125958cf567cc4748d054291e91d24f79f982fa25ee552ef0d72ddb",
    "1819_james_monroe_dr.txt": "0c7a17181964aa167ed583b550eeec77ab6579e1143515eb7f28c0c561186ede",
    "1820_james_monroe_dr.txt": "fc7936e51fd0b2c604fa4e8aec5635c05000d1318320feedff8f0d4f7ad7e53f",
    "1821_james_monroe_dr.txt": "5cb0e9cd5798999774d2ac24823e3e2a22118f9bc454f2ce4af6b587cb546b7c",
    "1822_james_monroe_dr.txt": "af12b87d56706d1df578169cecbd86897652b371aaa0d6d5c4c8356b0252dda8",
    "1823_james_monroe_dr.txt": "fb354b67a8ba9fbdc5888f954b76ac096d0b5a9cacd099dde8a4a1ede2eabfe3",
    "1824_james_monroe_dr.txt": "07b9a7d8adc80de60b68e85e13bff5cba95827f8da09dfc3136ab6cea34837d1",
    "1829_andrew_jackson_d.txt": "397ade33ddddb2520ba057507c3c3edb0b0a9b2ea34dd2fdbbd1b572cda93e78",
    "1830_andrew_jackson_d.txt": "838f978337af81df8561869d5d786166fb741c6b734d00e4b7b264c22e081010",
    "1831_andrew_jackson_d.txt": "0d7a3fa911919c2aa63bcd86cbd98639b00a432e9b6a13e04b14aeb9ba924151",
    "1832_andrew_jackson_d.txt": "88483d7baf76ef2a0bf767a8cb7e2b29594fb6df7689258d51cceafebc049b71",
    "1833_andrew_jackson_d.txt": "ddf25e6f7b4f4c40ba0e598037dd3c07e5a410edaa9d4a611acb22babde58e10",
    "1834_andrew_jackson_d.txt": "cca5be2b471a40d2158dcd74c6b48b411ca1007a3d4c643ba1494aec9f0fda04",
    "1835_andrew_jackson_d.txt": "bb48efbf2a4cb9d0d0a99f5fabfe908c62314131be1863a9f64155eeb5c6689c",
    "1836_andrew_jackson_d.txt": "38c8bc9121d94eb2fc77d11408aa720379033e765b957bf18e881de0034253a8",
    "1845_james_polk_d.txt": "7fb16d9448adfa68fd29969197f6ccfddcb6293cc844e7e9baa8890af87e4ad2",
    "1846_james_polk_d.txt": "a9cf3ed6238280f5fb4c23d2e87ddd2f75eccb8a197a839de84649edaea41f9c",
    "1847_james_polk_d.txt": "e1ef0ed3f3dc35306cadca5445848e262287a3806c60055300c01c986a60e375",
    "1848_james_polk_d.txt": "e7da8f9157df8f64d28a4893e0a0c18bd2a1d87c561c747ac1d11255e3a21985",
    "1853_franklin_pierce_d.txt": "ccefca41e3a4ff0cabe45648eebd2f36f6724f5a5dd9e7af8ff744e0f18598a6",
    "1854_franklin_pierce_d.txt": "39cbd60c26b2862016c3a7036f803deba64d3390b0516cfa6f0e18398bf37bc0",
    "1855_franklin_pierce_d.txt": "ecbb8da0cdfdd2baca7d56d3e8f1ea98ff259bfb3749d40cd45e866f21786b10",
    "1856_franklin_pierce_d.txt": "5f4dae4fb8a75c58a2b46a6b9f3b61a2db8e8624664fe77a509b5dee7297a920",
    "1861_abraham_lincoln_r.txt": "9ef836b9500ffdc04f31ecf6b835f9b6836941b6e0658c942c7b92bd5f5c1a0e",
    "1862_abraham_lincoln_r.txt": "0c23f3147d110b9d4454a81c13464d08918887f85c50d45cc0d018758a0e5025",
    "1863_abraham_lincoln_r.txt": "fac6d2bf6f3824d2cd042977562e81edf32e56f208f059cac9c85f3e1dc35384",
    "1864_abraham_lincoln_r.txt": "eac7412865135b33fa0a8714a8c559684b7665a1a1bd73b7ef3ade6b9a294350",
    "1869_ulysses_s_grant_r.txt": "91d8e1da6cd0920cb651867b5f1a44d05c4fa3942ebe02f78735cf0d583f26ef",
    "1870_ulysses_s_grant_r.txt": "d6c15caf968093be72588fd5841a26871cb8a28d9cccbd2e832b39041062a075",
    "1871_ulysses_s_grant_r.txt": "16376a9323a24715b425261f703b00dd8f3da2e6a83956c6897c00ddeedefbaf",
    "1872_ulysses_s_grant_r.txt": "a8b7892988631360951f8f99e9b7ce9a3ed6f007758d9e1426f651a792fc4737",
    "1873_ulysses_s_grant_r.txt": "aedc71c6de26be81e7a9d24ddfd7a7c67db656375d43e5fb89be398c525bd4d0",
    "1874_ulysses_s_grant_r.txt": "6ffde72179c9e50867e8d12c59302c2eb61938f45f5c6af0ba41f5e3b76378df",
    "1875_ulysses_s_grant_r.txt": "1c67e4027a9192632eaff6be4877df6d4267964f26468e0ea3402e7f47d7eb65",
    "1876_ulysses_s_grant_r.txt": "6439c85f8e4c68228c4eba010196b28e89ba0707e407637b433f0109098e2ae7",
    "1897_william_mc_kinley_r.txt": "519691f4ed675cb34d938e2173e15674ddcbc266ce282e46795f780851ff795b",
    "1898_william_mc_kinley_r.txt": "c64970fe63e831188c10499dbe12b7971fee6ff67584fddc44833da582417ae9",
    "1899_william_mc_kinley_r.txt": "0b28ba9d281941be2f0c850ff8f82612c6196db54e3ad584c9cca58a23bd64fc",
    "1900_william_mc_kinley_r.txt": "a6401b0a271d4dab98d34a490e3c2baec9feda4b82540d7aa706618b1c8f7424",
    "1901_theodore_roosevelt_r.txt": "6368f0307c92b79a05e87bdc863ad8311397c34c2a1fbd1436448ffa5d5d20ff",
    "1902_theodore_roosevelt_r.txt": "a29c5657719a8f4bb6b350bec3bb893b58ed4c1958a6879d810ee9d595fa2a6c",
    "1903_theodore_roosevelt_r.txt": "afbcd69909577bed1e5e02906f26b27a92d94eb9a7be17c0e90c6e52756dc7e7",
    "1904_theodore_roosevelt_r.txt": "11641435ed0bcfca6ea1adb1434d79ddb2470af8136505f96aa7281a096fe716",
    "1905_theodore_roosevelt_r.txt": "82bcf59058d80f6876845431288711df3286b9a78414dbd9501f64a2e9eb5b46",
    "1906_theodore_roosevelt_r.txt": "28412e6db231a618b125e3226fd11d9a03452a8eabd4d29c9d6ca802154ab1eb",
    "1907_theodore_roosevelt_r.txt": "8ed7d9af518741b7ad59e99397fa4e98df82fae4f3c8df73301d782a94f61275",
    "1908_theodore_roosevelt_r.txt": "a277f3880ddbe0fb187d21141114b1cf1206bfb7574c530b00ffb37aa84823db",
    "1913_woodrow_wilson_d.txt": "bd25893502b9ceeacea93429919ed9cdbc0b7316c6ed6c2970c00239d4274ac4",
    "1914_woodrow_wilson_d.txt": "f1133bc9de2a7ffdaf1c80ecc094fe890502c1766d76857028d9172f4952448c",
    "1915_woodrow_wilson_d.txt": "eba12354a6aaa3ddfddd9f1042af610f13bcb12dff219d72a7cf07a0d2987314",
    "1916_woodrow_wilson_d.txt": "2be450c27722b5ea84002c07a7ad90c2f41fbba7177037e59ebdff9a910bbd4d",
    "1917_woodrow_wilson_d.txt": "694bf5e071be41cd69433a2484a54174526674d082982d058b6f22126190a869",
    "1918_woodrow_wilson_d.txt": "f086bd58c393bd7aed2eea0fdccd25d7ec0632aa312e17e1ec1675d7381e0969",
    "1919_woodrow_wilson_d.txt": "d7478a3cdc9ec8a763b1954bc6f5fcf6889635dc969121f136fa4cdc6a8e3e42",
    "1920_woodrow_wilson_d.txt": "31a3370aeaceb7a66f4ce0f4c96639447922d1f1736c3ee6b9c2deb82a9180e6",
    "1923_calvin_coolidge_r.txt": "0d50cbf80f6329bca325e363ce5c49447e16c01c201c8898b5766be407ebe607",
    "1924_calvin_coolidge_r.txt": "cca335b913e15276c72b0469cdc3b33da23e26ae810d4845bce580643f1dc9a0",
    "1925_calvin_coolidge_r.txt": "9ee507aa37b3a94689094af7f622564fa24adf236ed648592dc2b0fd4c26fd1c",
    "1926_calvin_coolidge_r.txt": "829398aa9aef5c8c21e77a393157638879d6971339b7ec7701e443774b96b3fa",
    "1927_calvin_coolidge_r.txt": "b678beb6272194da651fe01f02bb976831f7e6dea126c2f772b636bb06c4b44b",
    "1928_calvin_coolidge_r.txt": "a8a6e095b4689a7557b7a993e6dbde30c480b26cff9c65000d99aeb76d0a315d",
    "1934_franklin_d_roosevelt_d.txt": "6c03db497b6002d746ab9615c99c8d112f71c2fbf43ea94f03ac91db0f20bffe",
    "1935_franklin_d_roosevelt_d.txt": "96a9a9b98175cd1d3bb29bd77cf26291470decdce37a97b59c7600cd88cb6ae1",
    "1936_franklin_d_roosevelt_d.txt": "ba2d92a6bca0619e86e465aa91cd52e87c686c8a12326c9dc18e2e024e8f6d69",
    "1937_franklin_d_roosevelt_d.txt": "debed9b9ec578128f02579ab712621c988cd22d52fcdad48a77d7af742bea0aa",
    "1938_franklin_d_roosevelt_d.txt": "65d455eaec9bef4b3435947c4f828e69808c9c13d152d71b871923e182906022",
    "1939_franklin_d_roosevelt_d.txt": "cdfb3e7c6f81698fc0443960b23b74d1d28410cf51c0052bdff5c74505efd438",
    "1940_franklin_d_roosevelt_d.txt": "6d8dbe66684009c644ba0f47405fa6bb73fbbf17cbcde79adbda2d614a602d34",
    "1941_franklin_d_roosevelt_d.txt": "4235f8997ef506a8f1054e4d115dd00280680fb38e55a6701d9eee643df7c704",
    "1942_franklin_d_roosevelt_d.txt": "1e52b713c69cc8dbb724627e866b21c16481dfe8b3994ac105d8e1e70981e6ca",
    "1943_franklin_d_roosevelt_d.txt": "b7decb26312bfef28a2960f588af45512d96a13d05e8474731130e07f7554553",
    "1944_franklin_d_roosevelt_d.txt": "c357211d1212f973905654b71edfc5e6d29c98adc3e026b19f3144a6018414f9",
    "1945_franklin_d_roosevelt_d.txt": "41ac015eaa1de2c0f523805f863b0cc01a0a3ee8948541c748dac956982ebe62",
    "1953_dwight_d_eisenhower_r.txt": "bc0b11d2bd3e99e331a03a6c7b2dd95cc71ed4e1080775ff309eb838625e8b2d",
    "1954_dwight_d_eisenhower_r.txt": "9b66f29a869e83e8abef5716df5167a8dde7fbbe061dcd5eacadffa50818e462",
    "1955_dwight_d_eisenhower_r.txt": "dc000c27fdaa8db6fd21ac6e138895876a43c6b2aa1733a8ec2d9f539fe3e90d",
    "1956_dwight_d_eisenhower_r.txt": "421593ec3cbd2cd528515af7073cdadbec34a4fa36e174fa9e9020dbd8aa4411",
    "1957_dwight_d_eisenhower_r.txt": "2e6f084b9555cd55b613e51bc96f7da2012194125b4ca5028fa0a3f0a1566b1d",
    "1958_dwight_d_eisenhower_r.txt": "48bc019172627bc46b48e61afb8204bb9e2753ab16bab4812fa15e58868516b4",
    "1959_dwight_d_eisenhower_r.txt": "0e57875e01aad7898388050b789ed81f484fb26c38632ce3b9f1b517db7871dd",
    "1960_dwight_d_eisenhower_r.txt": "018d7c431aeac7913309b32f5e47faba6a956bb80a1085b8700fb48c0bcaaf8c",
    "1961_dwight_d_eisenhower_r.txt": "ecd19093d7e62c02042643aba69292f442ffd2397557f3409c18e24baab6984c",
    "1964_lyndon_b_johnson_d.txt": "5f3afe83cf2566a9996018081a74e1225b50d670f647f7f9a08d62616bc93803",
    "1965_lyndon_b_johnson_d.txt": "d5a58076552404243972e8114c2108ceb523ae097a839dbf1fee55a3ffaf7335",
    "1966_lyndon_b_johnson_d.txt": "8eb14e5d172ba17e2a57eeaa5c373cb43ea7430415b25387967a090228464260",
    "1967_lyndon_b_johnson_d.txt": "6c9b7d8ae27340c676b35755ea2f5ecfae3b46096b762f2fec4e62cae294bd44",
    "1968_lyndon_b_johnson_d.txt": "6c63e5c396dbd1d5666b1737a2851555295e0c37a80875ada6a68d4119006bf6",
    "1969_lyndon_b_johnson_d.txt": "e85827395c8184ef1dbfad814822d32329ac488c61e4b999af849636bbe06c59",
    "1982_ronald_reagan_r.txt": "d021d8f9591d3daa1fc8aa93d69f151bc8489bc388c55bb163fd05864f257415",
    "1983_ronald_reagan_r.txt": "754aea648a099039a014a30ab2b3914a27e037d0fd6c4a94903d631fe13e8523",
    "1984_ronald_reagan_r.txt": "7461d28fb5ff01265264d13b1eb4b60bd4f7c7955561d7f814f9ee1f37f9ace5",
    "1985_ronald_reagan_r.txt": "f968953822ba96a7d5192e97ad9b1e3ee3cb18c58519d0eacfaf87efa60ae13e",
    "1986_ronald_reagan_r.txt": "4d86effbe55418b03a638773a00896a3079b840caf0322b637246faa7cae7391",
    "1987_ronald_reagan_r.txt": "8e71c12aa4abbf639cf4efcb8ddfb3a586a173585463423e3de70dd93d33d1b2",
    "1988_ronald_reagan_r.txt": "e3186d8d730f5cc27d6d06e7990d9941e14ea5adee0c4da563a831db3b271751",
    "2009_barack_obama_d.txt": "e23a45e13f30319cd805d124f5b24008fedf2cca9d6c779af3af00d92c9fc5bd",
    "2010_barack_obama_d.txt": "86ce9e685bbdec15d24cc9b79efe770b2f1a76ec5f3e211a54a45a717a8044c1",
    "2011_barack_obama_d.txt": "177691391e6d0651932ade958bcc7b831305cbb255fa3c71599c9844ccdcfd86",
    "2012_barack_obama_d.txt": "56c3a3d0ba5175d6ca79e228595a7c852ea8187a15ed78d114e1bfbc99f073e5",
    "2013_barack_obama_d.txt": "a1c6aff421bf0ddc24ccb989d8dfa5ebe7cd0a73e225447293b93409e53e5759",
    "2014_barack_obama_d.txt": "e4c22861404eeb6c2fd4ee9991fb7b14e0b1ec9827ef95babd2cab30aa5606d6",
    "2015_barack_obama_d.txt": "ccf7fa73209da6dfa498788ca2f064157a5e4455881a7e85798cbc848849d697",
    "2016_barack_obama_d.txt": "cc2f475c586da26b4adcf20e6b85bcddd43589972686cd7ba6c79d290ce27a2e",
}
WORDS, PASSAGE, HELD_OUT = 20_000, 100, 5
"""Words of each president, words of a passage at least, and passages of each president that are held out."""


@dataclass(frozen=True)
class Passage:
    """A stretch of an address, in whole sentences."""

    president: str
    year: int
    text: str

    def split(self, share: float = 0.4) -> tuple[str, str]:
        """Split into a prompt and the completion after it, at a word; the completion begins with the space."""
        words = self.text.split()
        place = max(1, min(len(words) - 1, round(share * len(words))))
        return " ".join(words[:place]), " " + " ".join(words[place:])


@dataclass(frozen=True)
class Addresses:
    """The passages of all presidents: those to learn from, and those that are held out."""

    train: tuple[Passage, ...]
    held_out: tuple[Passage, ...]


def load(words: int = WORDS, presidents: Sequence[str] = tuple(PRESIDENTS), held_out: int = HELD_OUT) -> Addresses:
    """Load the passages of some presidents, up to so many words each, with some passages held out of each."""
    train: list[Passage] = []
    asked: list[Passage] = []
    for president in presidents:
        passages = _choose(list(_read_passages(president)), words)
        if len(passages) <= held_out:
            raise DataError(
                f"{president} has {len(passages)} passages, and {held_out} are to be held out: use more words."
            )
        places = {round((index + 0.5) * len(passages) / held_out - 0.5) for index in range(held_out)}
        asked += [passage for place, passage in enumerate(passages) if place in places]
        train += [passage for place, passage in enumerate(passages) if place not in places]
    return Addresses(tuple(train), tuple(asked))


def _read_passages(president: str) -> Iterator[Passage]:
    name, (first, last) = PRESIDENTS[president]
    found = False
    for year in range(first, last + 1):
        file = f"{year}_{name}.txt"
        if file not in _FILES:
            continue
        found = True
        text = _read(file)
        yield from (Passage(president, year, passage) for passage in cut_passages(text))
    if not found:
        raise DataError(f"there is no address of {president}.")


def _read(file: str) -> str:
    place = fetch(f"sotu/{file}", _URL + file, _FILES[file])
    content = place.read_bytes()
    if hashlib.sha256(content).hexdigest() != _FILES[file]:
        raise DataError(f"{place} does not hold the address it is named by: its checksum differs.")
    return content.decode("utf-8", errors="replace")


def cut_passages(text: str, least: int = PASSAGE) -> list[str]:
    """Cut a text into passages of whole sentences with at least so many words; a short rest joins the last one.

    >>> cut_passages("One two. Three four. Five.", least=3)
    ['One two. Three four. Five.']
    >>> cut_passages("One two. Three four! Five six seven.", least=3)
    ['One two. Three four!', 'Five six seven.']
    """
    passages: list[str] = []
    begun: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+(?=[\"“A-Z0-9])", " ".join(text.split())):
        begun.append(sentence)
        if sum(len(each.split()) for each in begun) >= least:
            passages.append(" ".join(begun))
            begun = []
    if begun and passages:
        passages[-1] = " ".join([passages[-1], *begun])
    return passages or [" ".join(begun)]


def _choose(passages: list[Passage], words: int) -> list[Passage]:
    """Return passages at even distances, with so many words at most."""
    count = len(passages)
    while count > 1:
        chosen = [passages[round(index * (len(passages) - 1) / (count - 1))] for index in range(count)]
        total = sum(len(passage.text.split()) for passage in chosen)
        if total <= words:
            return chosen
        count = max(1, min(count - 1, int(count * words / total)))
    return passages[:1]
