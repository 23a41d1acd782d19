"""What `make docs` adds to the pages of docs/, which can be read as they are, too.

The site begins with README.md, followed by the list of all pages, and has CONTRIBUTING.md and the
pictures, which are outside of docs/. In api.md each name leads to its docstring.
"""

import os
import re

from mkdocs.structure.files import File

_RESULTS = 'benchmarks/results'


def on_files(files, config):
    """Takes along what the pages link to and is outside of docs/."""
    root = os.path.dirname(config['config_file_path'])
    folder = os.path.join(root, _RESULTS)
    for name in sorted(os.listdir(folder)):
        if name.endswith('.png'):
            files.append(File.generated(
                config, 'results/' + name, abs_src_path=os.path.join(folder, name)))
    files.append(File.generated(
        config, 'contributing.md', abs_src_path=os.path.join(root, 'CONTRIBUTING.md')))
    return files


def on_page_markdown(markdown, page, config, **unused):
    """Puts README.md before the list of pages, docstrings below the names of api.md, and makes
    links to what is outside of docs/ lead to where it is in the site."""
    name = page.file.src_uri
    if name == 'index.md':
        path = os.path.join(os.path.dirname(config['config_file_path']), 'README.md')
        with open(path, encoding='utf-8') as readme:
            _, _, pages = markdown.partition('\n## All pages\n')
            markdown = _within_the_site(readme.read() + '\n## All pages\n' + pages)
    elif name == 'contributing.md':
        markdown = _within_the_site(markdown)
    elif name == 'api.md':
        markdown = _with_docstrings(markdown)
    return markdown.replace('](../%s/' % _RESULTS, '](results/')


def _within_the_site(markdown):
    """A page from beside docs/, with links as of one in docs/; to a file of the program, none."""
    markdown = markdown.replace('](docs/', '](')
    markdown = re.sub(r'\]\((?:\.\./)?CONTRIBUTING\.md', '](contributing.md', markdown)
    return re.sub(r'\[([^]]*)\]\((?:examples|tests|towers)/[^)]*\)', r'\1', markdown)


def _with_docstrings(markdown):
    """The reference with links from its names to their docstrings, below each list of names."""
    def with_docstrings(group):
        names = re.findall(r'^- `(\w+)`', group.group(1), re.MULTILINE)
        linked = re.sub(r'^- `(\w+)`', r'- [`\1`](#towers.\1)', group.group(1), flags=re.MULTILINE)
        return linked + ''.join('\n::: towers.%s\n' % name for name in names)

    return re.sub(r'((?:^- `\w+`.*\n?)+)', with_docstrings, markdown, flags=re.MULTILINE)
